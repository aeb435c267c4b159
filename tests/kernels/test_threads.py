"""The thread team: every item once, barriers that hold, quiet when idle, alive after fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

NUM_THREADS = [1, 2, 3, 8]  # more than any test machine is sure to have


@pytest.mark.parametrize("num_threads", NUM_THREADS)
@pytest.mark.parametrize("num_items", [0, 1, 2, 7, 1000])
def test_each_item_is_visited_once_per_round(native: ModuleType, num_threads: int, num_items: int):
    team = native.ThreadTeam(num_threads)
    assert team.num_threads == num_threads
    assert team.run_counting_regions(25, num_items) == [50] * num_items


def test_many_regions(native: ModuleType, scale: int):
    assert native.ThreadTeam(3).run_counting_regions(500 * scale, 5) == [1000 * scale] * 5


def test_a_team_that_never_ran_has_nothing_to_end(native: ModuleType):
    for _ in range(100):
        native.ThreadTeam(4)


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_odd_numbers_of_threads_are_refused(native: ModuleType, num_threads: int):
    with pytest.raises(ValueError, match="from 1 to 1024"):
        native.ThreadTeam(num_threads)


def test_threads_end_with_their_team(native: ModuleType):
    before = num_os_threads()
    team = native.ThreadTeam(4)
    assert num_os_threads() == before
    team.run_counting_regions(1, 1)
    assert num_os_threads() == before + 3
    del team
    assert num_os_threads() == before


def test_callers_take_turns(native: ModuleType):
    team = native.ThreadTeam(2)
    results: list[list[int]] = []
    callers = [
        threading.Thread(target=lambda: results.append(team.run_counting_regions(50, 20)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [[100] * 20] * 4


def test_idle_threads_sleep(native: ModuleType):
    """A thread that spins between regions would be found running in some of the looks."""
    others = set(os.listdir("/proc/self/task"))
    team = native.ThreadTeam(4)
    team.run_counting_regions(10, 10)
    threads = set(os.listdir("/proc/self/task")) - others
    assert len(threads) == 3
    time.sleep(0.2)  # a team may spin shortly before it sleeps
    for _ in range(20):
        for thread in threads:
            stat = Path(f"/proc/self/task/{thread}/stat").read_text()
            assert stat.rpartition(")")[2].split()[0] == "S"
        time.sleep(0.01)


def test_a_forked_child_gets_threads_of_its_own(native: ModuleType):
    """In a process of its own, which has no other threads; a hang would end with the time limit."""
    program = f"""
import os
import {native.__name__} as native
team, unused = native.ThreadTeam(4), native.ThreadTeam(2)
assert team.run_counting_regions(10, 10) == [20] * 10
for generation in range(3):  # a child, its child, and so on
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        break
    assert team.run_counting_regions(10, 10) == [20] * 10
    assert unused.run_counting_regions(1, 3) == [2] * 3
assert team.run_counting_regions(10, 10) == [20] * 10
del team, unused
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_what_was_started_before_a_fork_is_done_anew_in_the_child(native: ModuleType):
    """Parent and child both get the tokens of logits whose sampling had only started."""
    program = f"""
import os
import numpy as np
import {native.__name__} as native
from kvloom.request import ResolvedSamplingParams
from kvloom.sampling.native import NativeSampler
from kvloom.sampling.sampler import SamplingRow
params = ResolvedSamplingParams(seed=0, max_tokens=9, temperature=0.0)
for num_threads in (1, 3):
    sampler = NativeSampler(native, native.ThreadTeam(num_threads), 1000)
    logits = np.zeros((40, 1000), np.float32)
    for start_before in (False, True):  # with the team's threads there, and without
        logits[np.arange(40), np.arange(40) * 7] = 1.0
        if start_before:
            sampler.sample(logits, [SamplingRow(params, [], [])] * 40)
        started = sampler.start(logits, [SamplingRow(params, [], [])] * 40)
        pid = os.fork()
        assert started.finish().token_ids == [7 * i for i in range(40)]
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def num_os_threads() -> int:
    return len(os.listdir(f"/proc/{os.getpid()}/task"))
