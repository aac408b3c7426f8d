import threading

import pytest

from serve_app.runtime.author import Author


@pytest.fixture
def author():
    author = Author()
    yield author
    author.shutdown()


def test_everything_runs_in_one_thread_in_order(author):
    futures = [author.submit(lambda i=i: (i, threading.get_ident())) for i in range(50)]
    assert [f.result(60) for f in futures] == [(i, author.ident) for i in range(50)]


def test_what_a_task_raises_reaches_its_caller_and_the_thread_goes_on(author, caplog):
    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        author.submit(leave).result(60)
    author.post(leave)
    assert author.submit(int, "7").result(60) == 7
    assert "a task of the author's thread failed" in caplog.text


def test_a_task_that_was_cancelled_before_its_turn_does_not_run(author):
    gate, ran = threading.Event(), []
    author.post(gate.wait, 10)
    later = author.submit(ran.append, 1)
    assert later.cancel()
    gate.set()
    author.submit(int).result(60)
    assert ran == []


def test_shutdown_runs_what_was_given_before_and_refuses_more():
    author, ran = Author(), []
    author.post(ran.append, 1)
    author.shutdown()
    assert ran == [1]
    with pytest.raises(RuntimeError):
        author.submit(int)
