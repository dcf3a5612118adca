"""The scheduler without HTTP: order, refusals, cancellation, exceptions, shutdown."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from oracles import text_model, tokenizer
from parcae.infer.engine import Engine
from parcae.infer.exit import EXIT_RULES, register_exit_rule
from parcae.serving.metrics import Metrics
from parcae.serving.protocol import ApiError
from parcae.serving.scheduler import FairQueue, Job, Scheduler
from parcae.serving.settings import ServerSettings

OPTIONS = (
    {"loops": 1},
    {"loops": 4, "exit": "state:0.5"},
    {"loops": 3, "draft_loops": 1},
    {"loops": 2, "logprobs": 2},
)


class Served:
    """A scheduler whose steps wait for `run`, and what its jobs have emitted."""

    def __init__(self, gated: bool = False, **settings) -> None:
        limits = ServerSettings(**{"max_batch_size": 4, "max_choices": 1, **settings})
        self.engine = Engine(
            text_model(), tokenizer(), max_batch_size=limits.max_batch_size, prefill_tokens=8
        )
        self.events: dict[Job, queue.Queue] = {}
        self.ended: list[Job] = []
        self._gate = threading.Semaphore(0)
        if gated:
            step = self.engine.step
            self.engine.step = lambda: (self._gate.acquire(), step())[1]  # type: ignore
        self.scheduler = Scheduler(self.engine, limits, Metrics())

    def run(self, steps: int = 1000) -> None:
        self._gate.release(steps)

    def job(self, prompt: str = "def ", client: str = "", seconds=60.0, **options) -> Job:
        request = self.engine.request(prompt, **{"max_new_tokens": 5, "loops": 2, **options})
        events: queue.Queue = queue.Queue()

        def emit(event) -> None:
            if isinstance(event, ApiError) or event.finish:
                self.ended.append(job)
            events.put(event)

        job = Job(request, emit, client, seconds)
        self.events[job] = events
        return job

    def submit(self, *arguments, **options) -> Job:
        job = self.job(*arguments, **options)
        self.scheduler.submit([job])
        return job

    def start(self, *jobs: Job) -> None:
        """Submit jobs together and wait until they are in the engine."""
        self.scheduler.submit(jobs)
        wait_until(lambda: self.scheduler.running == len(jobs))

    def text(self, job: Job) -> str:
        """All that a job emitted; its error is raised."""
        text = ""
        while True:
            event = self.events[job].get(timeout=60)
            if isinstance(event, ApiError):
                raise event
            text += "".join(piece.text for piece in event.pieces)
            if event.finish:
                assert self.events[job].empty()
                return text


@pytest.fixture
def served():
    made: list[Served] = []

    def make(**options) -> Served:
        made.append(Served(**options))
        return made[-1]

    yield make
    for one in made:
        one.run()
        one.scheduler.close()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_texts_are_those_of_the_engine_whatever_runs_beside_them(served, plain_engine):
    one = served()
    cases = [
        ("def main(", {"seed": n, "max_new_tokens": 3 + n, **OPTIONS[n % 4]}) for n in range(12)
    ]
    jobs = [one.submit(prompt, client=str(n % 3), **o) for n, (prompt, o) in enumerate(cases)]
    for job, (prompt, options) in zip(jobs, cases, strict=True):
        assert one.text(job) == plain_engine.generate(prompt, **options).text


def test_a_job_that_does_not_stream_has_one_delta(served, plain_engine):
    one = served(gated=True)
    options = {"max_new_tokens": 9, "logprobs": 1, "seed": 3}
    whole, other = one.job(**options), one.job(**options)
    whole.stream = False
    one.start(whole, other)
    one.run()
    expected = plain_engine.generate("def ", loops=2, **options)
    assert one.text(other) == expected.text
    delta = one.events[whole].get(timeout=60)
    assert [piece.token for piece in delta.pieces] == list(expected.tokens)
    assert delta.finish == expected.finish
    for one_row, in_batch in zip(expected.logprobs, delta.logprobs, strict=True):
        assert in_batch.token == one_row.token
        assert in_batch.logprob == pytest.approx(one_row.logprob, abs=1e-5)
        assert dict(in_batch.alternatives) == pytest.approx(dict(one_row.alternatives), abs=1e-5)
    assert one.events[whole].empty()


def test_clients_are_served_in_turn(served):
    one = served(max_batch_size=1, gated=True)
    first = one.submit(client="a", max_new_tokens=1)
    wait_until(lambda: one.scheduler.running)
    many = [one.submit(client="a", max_new_tokens=1) for _ in range(3)]
    other = [one.submit(client="b", max_new_tokens=1) for _ in range(2)]
    one.run()
    wait_until(lambda: len(one.ended) == 6)
    expected = [first, many[0], other[0], many[1], other[1], many[2]]
    assert [one.ended.index(job) for job in expected] == list(range(6))


def test_no_key_holds_the_rows_of_all(served, plain_engine):
    """Its texts wait, although there is a row, until a text of another key has begun."""
    one = served(max_batch_size=3, gated=True)
    one.scheduler.keys = 2
    many = [one.job(client=f"0 {n % 2}", max_new_tokens=20) for n in range(5)]
    one.scheduler.submit(many)
    wait_until(lambda: one.scheduler.running == 2)
    one.run(3)
    wait_until(lambda: many[0].emitted)
    assert (one.scheduler.running, one.scheduler.waiting) == (2, 3)
    other = one.submit(client="1 a", max_new_tokens=1)
    one.run()
    text = plain_engine.generate("def ", loops=2, max_new_tokens=20).text
    assert [one.text(job) for job in many] == [text] * 5
    assert one.text(other) == plain_engine.generate("def ", loops=2, max_new_tokens=1).text
    assert one.ended[0] is other


@pytest.mark.parametrize(("rows", "keys", "held"), [(1, 9, 1), (2, 9, 1), (8, 1, 8), (64, 99, 56)])
def test_rows_that_a_key_may_hold_alone(served, rows, keys, held):
    one = served(max_batch_size=rows, gated=True, max_waiting=100)
    one.scheduler.keys = keys
    one.scheduler.submit([one.job(client="0 a") for _ in range(rows + 1)])
    wait_until(lambda: one.scheduler.running == held)
    one.run(2)
    assert one.scheduler.waiting == rows + 1 - held


def test_a_full_queue_refuses_the_client_with_most_jobs():
    waiting = FairQueue(3)
    engine = Engine(text_model(), tokenizer())
    request = engine.request("a", loops=1)
    many = [Job(request, print, "many") for _ in range(4)]
    few = [Job(request, print, "few") for _ in range(3)]
    assert [waiting.add([job]) for job in many] == [[], [], [], None]
    assert waiting.add(few[:2]) is None, "its client would have more"
    assert list(waiting) == many[:3], "a request that is refused displaces nothing"
    assert waiting.add(few[:1]) == [many[2]], "its client has fewer"
    assert waiting.add(few[1:2]) is None, "each would have as many"
    assert [waiting.pop() for _ in range(4)] == [many[0], few[0], many[1], None]


def test_the_queue_is_bounded_and_all_or_none(served):
    one = served(max_batch_size=1, gated=True, max_waiting=2)
    running = one.submit()
    wait_until(lambda: one.scheduler.running)
    waiting = one.submit()
    with pytest.raises(ApiError) as error:
        one.scheduler.submit([one.job(), one.job()])
    assert (error.value.status, error.value.headers["Retry-After"]) == (429, "2")
    assert one.scheduler.waiting == 1
    assert one.scheduler.metrics.refused == 1
    one.run()
    assert one.text(running) == one.text(waiting)


def test_a_request_that_has_begun_is_finished_whole(served):
    """Its other texts are neither displaced nor refused for a long wait nor by a drain."""
    one = served(max_batch_size=1, gated=True, max_waiting=4, queue_seconds=30)
    begun = [one.job(client="many", seconds=600.0) for _ in range(4)]
    one.scheduler.submit(begun)
    wait_until(lambda: one.scheduler.running)
    other = one.submit(client="many")
    with pytest.raises(ApiError, match="queue is full"):
        one.scheduler.submit([one.job(client="few"), one.job(client="few")])
    for job in begun:
        job.submitted -= 31
    one.run(1)
    closing = threading.Thread(target=one.scheduler.close, args=(60,))
    closing.start()
    with pytest.raises(ApiError, match="stopping"):
        one.text(other)
    one.run()
    assert len({one.text(job) for job in begun}) == 1
    closing.join(60)
    assert one.scheduler.state == "closed"


def test_a_text_that_waits_beyond_the_time_of_its_request_ends(served):
    one = served(max_batch_size=1, gated=True)
    running = one.submit()
    wait_until(lambda: one.scheduler.running)
    late = one.submit(seconds=0.01)
    time.sleep(0.02)
    one.run()
    with pytest.raises(ApiError) as error:
        one.text(late)
    assert error.value.status == 504
    assert one.text(running)


def test_an_exception_at_admission_fails_only_its_job(served):
    one = served(gated=True)
    before = one.job(max_new_tokens=9)
    one.start(before)
    submit = one.engine.submit

    def fail(request):
        one.engine.submit = submit
        raise RuntimeError("out of memory")

    one.engine.submit = fail
    faulty = one.submit()
    one.run()
    with pytest.raises(ApiError) as error:
        one.text(faulty)
    assert (error.value.status, error.value.code) == (500, "engine_error")
    assert one.text(before)
    assert one.text(one.submit()), "the engine serves on"


def test_cancelled_jobs_free_their_place(served):
    one = served(max_batch_size=1, gated=True)
    running, waiting, last = (one.submit(max_new_tokens=40), one.submit(), one.submit())
    wait_until(lambda: one.scheduler.running)
    one.scheduler.cancel([running, waiting])
    one.run()
    assert one.text(last)
    assert one.ended == [last]
    assert one.engine.running == one.engine.waiting == 0


def test_a_job_that_waits_too_long_is_refused(served):
    one = served(max_batch_size=1, gated=True, queue_seconds=0.02)
    running = one.submit()
    wait_until(lambda: one.scheduler.running)
    waiting = one.submit()
    time.sleep(0.03)
    one.run()
    with pytest.raises(ApiError, match="waited too long") as error:
        one.text(waiting)
    assert error.value.status == 429
    assert one.text(running)


@pytest.mark.slow
def test_a_job_that_takes_too_long_ends(served):
    one = served(gated=True)
    late, other = one.job(seconds=0.5, max_new_tokens=40), one.job()
    one.start(late, other)
    time.sleep(0.5)
    one.run()
    with pytest.raises(ApiError) as error:
        one.text(late)
    assert error.value.status == 504
    assert one.text(other)
    assert one.engine.running == 0


@pytest.fixture
def failing_rule():
    def fail(step, threshold):
        raise ValueError("secret")

    register_exit_rule("fails", fail)
    yield "fails:1"
    del EXIT_RULES._registered["fails"]


def test_an_exception_fails_only_the_job_at_fault(served, plain_engine, failing_rule):
    one = served(gated=True)
    cases = [{"seed": n, "max_new_tokens": 8, "temperature": 1.0} for n in range(3)]
    jobs, faulty = [one.job(**options) for options in cases], one.job(exit=failing_rule)
    one.start(*jobs, faulty)
    one.run()
    for job, options in zip(jobs, cases, strict=True):
        assert one.text(job) == plain_engine.generate("def ", loops=2, **options).text
    with pytest.raises(ApiError) as error:
        one.text(faulty)
    assert (error.value.status, error.value.code) == (500, "engine_error")
    assert "secret" not in str(error.value)
    assert one.scheduler.metrics.retries == 4
    assert one.scheduler.metrics.failures == 1
    assert one.text(one.submit()), "the engine serves on"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("part", ["pass", "step"])
def test_tokens_are_handed_out_once_if_a_job_runs_again(served, plain_engine, part, stream):
    one = served(gated=True)
    target, name = (one.engine.network, "forward") if part == "pass" else (one.engine, "_decode")
    original, calls = getattr(target, name), []

    def fail_once(*arguments, **options):
        calls.append(name)
        if len(calls) == 6:
            raise MemoryError
        return original(*arguments, **options)

    setattr(target, name, fail_once)
    cases = [{"seed": n, "max_new_tokens": 9, "logprobs": 1} for n in range(3)]
    jobs = [one.job(**options) for options in cases]
    for job in jobs:
        job.stream = stream
    one.start(*jobs)
    one.run()
    for job, options in zip(jobs, cases, strict=True):
        assert one.text(job) == plain_engine.generate("def ", loops=2, **options).text
        assert len(job.emitted) == 9
    assert one.scheduler.metrics.retries >= 2


def test_a_broken_thread_answers_everyone(served):
    one = served(gated=True)

    def broken(*arguments):
        raise OSError

    one.scheduler.metrics.count_step = broken
    jobs = [one.submit() for _ in range(6)]
    one.run()
    for job in jobs:
        with pytest.raises(ApiError):
            one.text(job)
    assert one.scheduler.state == "failed"
    with pytest.raises(ApiError):
        one.submit()


def test_draining_finishes_what_has_begun(served):
    one = served(max_batch_size=1, gated=True)
    running = one.submit()
    wait_until(lambda: one.scheduler.running)
    waiting = one.submit()
    closing = threading.Thread(target=one.scheduler.close, args=(60,))
    closing.start()
    with pytest.raises(ApiError) as error:
        one.text(waiting)
    assert error.value.status == 503
    with pytest.raises(ApiError):
        one.submit()
    one.run()
    assert one.text(running)
    closing.join(60)
    assert one.scheduler.state == "closed"


def test_closing_at_once_ends_running_jobs(served):
    one = served(gated=True)
    running = one.submit(max_new_tokens=40)
    wait_until(lambda: one.scheduler.running)
    one.run(2)
    closing = threading.Thread(target=one.scheduler.close)
    closing.start()
    wait_until(lambda: one.scheduler.state == "closed")
    one.run()
    with pytest.raises(ApiError, match="stopping"):
        one.text(running)
    closing.join(60)
    assert one.engine.running == 0


def test_jobs_wait_in_the_queue_for_memory_and_not_for_ever(served, plain_engine):
    """Room for one row: the second job waits in the engine, the others in the queue."""
    one = served(gated=True, queue_seconds=60)
    cache = one.engine.cache
    cache.max_bytes = cache.bytes_per_token(2) * 64
    first = one.submit(max_new_tokens=40)
    wait_until(lambda: one.scheduler.running == 1)
    rest = [one.submit(client=str(n), seconds=600.0) for n in range(3)]
    one.run(1)
    engine, scheduler = one.engine, one.scheduler
    wait_until(lambda: (engine.running, engine.waiting, scheduler.waiting) == (1, 1, 2))
    for job in rest:
        job.submitted -= 61
    one.run()
    for job in rest:
        with pytest.raises(ApiError) as error:
            one.text(job)
        assert (error.value.status, error.value.headers["Retry-After"]) == (429, "2")
    assert one.text(first) == plain_engine.generate("def ", loops=2, max_new_tokens=40).text
    assert one.text(one.submit())


def test_a_job_that_memory_has_no_room_for_is_refused(served, monkeypatch):
    one = served()
    one.engine.cache.max_bytes = 1000
    with pytest.raises(ApiError) as error:
        one.text(one.submit())
    assert (error.value.status, error.value.code) == (429, "busy")
