import asyncio
import queue
import threading

import pytest

from serve_app.runtime.handler_thread import HandlerThread, MainThread


@pytest.fixture
def handler_thread():
    handler_thread = HandlerThread()
    yield handler_thread
    handler_thread.shutdown()


def test_everything_runs_in_one_thread_in_order(handler_thread):
    futures = [handler_thread.submit(lambda i=i: (i, threading.get_ident())) for i in range(50)]
    assert [f.result(60) for f in futures] == [(i, handler_thread.ident) for i in range(50)]


def test_what_a_task_raises_reaches_its_caller_and_the_thread_goes_on(handler_thread, caplog):
    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        handler_thread.submit(leave).result(60)
    handler_thread.post(leave)
    assert handler_thread.submit(int, "7").result(60) == 7
    assert "a task of the author's thread failed" in caplog.text


def test_a_task_that_was_cancelled_before_its_turn_does_not_run(handler_thread):
    gate, ran = threading.Event(), []
    handler_thread.post(gate.wait, 10)
    later = handler_thread.submit(ran.append, 1)
    assert later.cancel()
    gate.set()
    handler_thread.submit(int).result(60)
    assert ran == []


def test_shutdown_runs_what_was_given_before_and_refuses_more():
    handler_thread, ran = HandlerThread(), []
    handler_thread.post(ran.append, 1)
    handler_thread.shutdown()
    assert ran == [1]
    with pytest.raises(RuntimeError):
        handler_thread.submit(int)


def test_the_idle_callback_runs_once_after_each_pause() -> None:
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()
    handler_thread = HandlerThread(on_idle=lambda: calls.put(threading.get_ident()), idle_after=0.01)
    for _ in range(2):  # the first pause is that before the first task
        assert calls.get(timeout=60) == handler_thread.ident
        with pytest.raises(queue.Empty):
            calls.get(timeout=0.05)
        handler_thread.submit(int).result()
    handler_thread.shutdown()


def test_the_main_thread_runs_one_handler_thread_after_the_other(monkeypatch):
    main, done = MainThread(), []
    monkeypatch.setattr("serve_app.runtime.handler_thread.MAIN_THREAD", main)
    main.offer()

    def use_threads():
        for _ in range(2):
            first = HandlerThread()
            second, own = HandlerThread(), HandlerThread(own=True)
            threads = [made.submit(threading.current_thread).result(60) for made in (first, second, own)]
            done.append([thread is threading.main_thread() for thread in threads])
            for made in (own, second, first):
                made.shutdown()
        HandlerThread().submit(asyncio.get_event_loop).result(60)
        main.end()

    user = threading.Thread(target=use_threads)
    user.start()
    main.run_work()
    user.join()
    assert done[0] == [True, False, False]
