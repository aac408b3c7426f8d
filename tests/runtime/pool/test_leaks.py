"""Detection of leaks: the growth of a process is attributed to the versions that ran."""

from __future__ import annotations

from serve_app.domain.model import ModelRef
from serve_app.runtime.pool.leaks import LeakDetector
from serve_app.runtime.pool.memory import MemoryUse

MIB = 1 << 20
LEAKING, OTHER = ModelRef("leaking", "1.0"), ModelRef("other", "1.0")


def test_the_version_that_ran_while_the_process_grew_is_named() -> None:
    detector = LeakDetector(MemoryUse(400 * MIB), MemoryUse(200 * MIB))
    use, loaded = 300, MemoryUse(100 * MIB)
    leaking = other = 0.0
    for second in range(60):
        leaking, other = leaking + 0.5, other + (0.5 if second % 2 else 0.0)
        use += 12 if second % 2 == 0 else 6  # 6 MiB for each half of a second of one of them
        leak = detector.sample(MemoryUse(use * MIB), loaded, {LEAKING: leaking, OTHER: other})
        if leak is not None:
            break
    assert leak is not None
    assert leak.ref == LEAKING
    assert leak.process > 500 * MIB
    assert "its handler leaks memory: the process grew by" in str(leak)


def test_memory_within_the_budget_or_of_loads_is_no_leak() -> None:
    detector = LeakDetector(MemoryUse(400 * MIB), MemoryUse(200 * MIB))
    busy = 0.0
    for use in range(300, 690, 10):  # within the budget, and what allocators may keep
        busy += 1.0
        assert detector.sample(MemoryUse(use * MIB), MemoryUse(100 * MIB), {OTHER: busy}) is None
    detector = LeakDetector(MemoryUse(400 * MIB), MemoryUse(200 * MIB))
    detector.restart(MemoryUse(900 * MIB), {OTHER})  # a load
    assert detector.sample(MemoryUse(900 * MIB), MemoryUse(700 * MIB), {OTHER: busy + 1}) is None
    assert detector.sample(MemoryUse(901 * MIB), MemoryUse(100 * MIB), {OTHER: busy + 2}) is None


def test_an_evicted_version_is_not_named_again() -> None:
    detector = LeakDetector(MemoryUse(100 * MIB), MemoryUse(0))
    assert detector.sample(MemoryUse(0), MemoryUse(0), {LEAKING: 1.0}) is None
    assert detector.sample(MemoryUse(500 * MIB), MemoryUse(0), {LEAKING: 2.0}) is not None
    assert detector.sample(MemoryUse(500 * MIB), MemoryUse(0), {}) is None


def test_a_version_that_is_loaded_again_is_not_charged_for_the_earlier_one() -> None:
    detector = LeakDetector(MemoryUse(100 * MIB), MemoryUse(0))
    for second in range(1, 3):
        grown = MemoryUse(60 * second * MIB)
        assert detector.sample(grown, MemoryUse(0), {LEAKING: 9.0 * second, OTHER: 0.1}) is None
    detector.restart(MemoryUse(100 * MIB), {OTHER})
    detector.restart(MemoryUse(300 * MIB), {OTHER, LEAKING})  # another archive of the name
    leak = detector.sample(MemoryUse(500 * MIB), MemoryUse(0), {LEAKING: 0.2, OTHER: 0.9})
    assert leak is not None and leak.ref == OTHER
