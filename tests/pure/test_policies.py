"""The three policies, shares of tenants, priorities that age, and that nobody waits for ever (K7)."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from toy import VOCAB, Letters, Rig

from headrace.params import SamplingParams
from headrace.scheduler import turns
from headrace.scheduler.policy import Continuous, Dynamic, Static
from headrace.scheduler.rate import Rate
from headrace.scheduler.request import Request
from headrace.scheduler.turns import EXPECTED_ANSWER, PRIORITY_TOKENS, FairShare
from headrace.scheduler.windows import Windows

_orders = itertools.count()


def request(
    prompt: int = 10,
    answer: int = 10,
    *,
    tenant: str = "",
    priority: int = 0,
    arrived: float = 0.0,
    choice: int = 0,
    windows: Windows | None = None,
) -> Request:
    order = next(_orders)
    params = SamplingParams(priority=priority)
    return Request(
        id=order,
        user=order,
        choice=choice,
        params=params,
        tokens=[0] * prompt,
        prompt=prompt,
        limit=prompt + answer,
        eos=frozenset(),
        ends=frozenset(),
        text=Letters(params),
        arrived=arrived,
        order=order,
        tenant=tenant,
        windows=windows,
    )


# Batches


def test_continuous_lets_everybody_in() -> None:
    waiting = [request() for _ in range(5)]
    assert list(Continuous().admits(waiting, [request()], 0.0)) == waiting
    assert Continuous().retry_s is None


def test_static_waits_for_a_full_batch_and_runs_it_to_the_end() -> None:
    rig = Rig(budget=4, policy=Static(3, patience_s=1000), context=50)
    users = [rig.submit([i, i], max_tokens=3 + 4 * i) for i in range(2)]
    assert rig.step() is None, "the batch is not full"
    assert 0 < (rig.scheduler.retry_s or 0) <= 1000
    users += [rig.submit([i, i], max_tokens=4) for i in range(2, 7)]
    ended: list[set[int]] = []
    for _ in range(100):
        running = {r.user for r in rig.scheduler.running}
        ended.append({u for u in users if (u, 0) in rig.got and rig.got[u, 0].finish})
        assert running <= set(users[:3]) or (running <= set(users[3:6]) and ended[-1] >= set(users[:3]))
        if rig.step() is None:
            break
    assert ended[-1] == set(users[:6])
    assert [r.user for r in rig.scheduler.waiting] == users[6:], "the last is alone"
    rig.submit([9, 9], max_tokens=1)
    rig.submit([8, 8], max_tokens=1)
    rig.run()
    assert len(rig.got) == 9


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_batch_whose_members_come_and_go_takes_nobody_else_in(size: int) -> None:
    """Prompts longer than the budget, preemptions, and newcomers of tenants that go before all that waits."""
    rig = Rig(count=10, block=4, budget=3, rows=8, context=40, policy=Static(size, patience_s=0))
    batch = [rig.submit([i, 1, 2, 3], max_tokens=20, tenant="one") for i in range(size)]
    rig.step()
    for step in range(400):
        if step < 20:
            rig.submit([5, step % VOCAB], max_tokens=1, tenant=f"{step}")
        rig.step()
        over = all((u, 0) in rig.got and rig.got[u, 0].finish for u in batch)
        if over:
            break
        assert {r.user for r in rig.scheduler.running} <= set(batch)
    assert over
    rig.run()
    assert all(rig.got[u, 0] == rig.naive([i, 1, 2, 3], max_tokens=20) for i, u in enumerate(batch))
    assert size < 5 or rig.scheduler.stats().preemptions > 0


def test_static_gives_up_hope_when_nobody_comes() -> None:
    policy = Static(4, patience_s=10)
    waiting = [request(arrived=100.0), request(arrived=103.0)]
    assert policy.admits(waiting, [], 112.0) == ()
    assert policy.retry_s == pytest.approx(1.0)
    assert policy.admits(waiting, [], 113.0) == waiting
    assert policy.retry_s is None


def test_dynamic_waits_for_size_or_time() -> None:
    policy = Dynamic(2, max_wait_s=0.1)
    first, second, third = (request(arrived=t) for t in (5.0, 5.04, 5.06))
    assert policy.admits([first], [], 5.03) == ()
    assert policy.retry_s == pytest.approx(0.07)
    assert policy.admits([first, second, third], [], 5.06) == [first, second], "it is full"
    assert policy.retry_s is None
    assert policy.admits([third], [first, second], 9.0) == [], "nobody joins"
    assert policy.admits([third], [second], 9.0) == []
    assert policy.admits([third], [], 5.1) == ()
    assert policy.admits([third], [], 5.17) == [third], "it has waited"
    policy = Dynamic(3, max_wait_s=0.05)
    assert policy.admits([second, first], [], 5.049) == ()
    assert policy.admits([second, first], [], 5.051) == [second, first], "whoever came first counts"


def test_members_that_wait_again_belong_to_the_batch_though_nobody_runs() -> None:
    policy = Dynamic(2, max_wait_s=1000)
    first, second, other = request(), request(), request()
    assert policy.admits([first, second], [], 0.0) == [first, second]
    assert policy.admits([other, second], [], 0.0) == [second], "preempted, while the first has ended"
    assert policy.admits([other], [], 0.0) == ()


# Turns


class Server:
    """Begins the first of the queue in each round and ends it some rounds later: a scheduler without tokens."""

    def __init__(self, seats: int = 1) -> None:
        self.turns = FairShare()
        self.queue: list[tuple[tuple[int, ...], Request]] = []
        self.running: list[Request] = []
        self.seats = seats
        self.begun: list[Request] = []

    def submit(self, one: Request) -> Request:
        one.rank = self.turns.rank(one)
        heapq.heappush(self.queue, (one.rank, one))
        return one

    def round(self, answer: int | None = None) -> None:
        if len(self.running) == self.seats:
            self.end(self.running.pop(0), answer)
        if self.queue:
            _, one = heapq.heappop(self.queue)
            self.turns.begins(one)
            one.started = 0.0
            self.running.append(one)
            self.begun.append(one)

    def end(self, one: Request, answer: int | None = None) -> None:
        """`answer`: how long it became; None: as long as it might."""
        one.tokens += [0] * (one.limit - one.prompt if answer is None else answer)
        self.turns.ends(one)

    def work(self, since: int = 0) -> Counter[str]:
        """Tokens begun for each tenant."""
        done: Counter[str] = Counter()
        for one in self.begun[since:]:
            done[one.tenant] += one.limit
        return done


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    rng = random.Random(1)
    server = Server(seats=3)
    for _ in range(500):
        for _ in range(rng.choice((0, 0, 1, 3))):
            server.submit(request(rng.randint(1, 900), rng.randint(1, 900)))
        server.round(answer=rng.choice((1, 50, 900)))
    assert len(server.begun) > 300
    assert [r.order for r in server.begun] == sorted(r.order for r in server.begun)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_always_waits_gets_an_equal_share(seed: int) -> None:
    """Of tokens, not of requests, over any span of time, whatever others come and go."""
    rng = random.Random(seed)
    server = Server(seats=rng.choice((1, 4)))
    sizes = {name: rng.randint(20, 250) for name in "abc"}
    for name, size in sizes.items():
        for _ in range(40):
            server.submit(request(size, rng.randint(1, 200), tenant=name))
    fresh = rng.choice((0, 0.3))
    while min(Counter(r.tenant for _, r in server.queue)[name] for name in sizes) > 3:
        if rng.random() < fresh:
            server.submit(request(rng.randint(1, 99), 9, tenant=f"fresh {len(server.begun)}"))
        server.round()
    most = 450
    for start in range(0, len(server.begun), 5):
        work = [server.work(start)[name] for name in sizes]
        assert max(work) - min(work) <= 2 * most, "unequal shares"
    assert len(server.begun) > 30


def test_a_tenant_with_one_request_does_not_stand_behind_anothers_thousand() -> None:
    server = Server()
    for _ in range(1000):
        server.submit(request(100, 100, tenant="flood"))
    for _ in range(10):
        server.round()
        one = server.submit(request(100, 100, tenant="one"))
        server.round()
        server.round()
        assert one in server.begun
    shares = server.work(1)
    assert shares["flood"] <= 2.2 * shares["one"]


def test_what_was_used_while_nobody_else_was_there_is_not_held_against_anybody() -> None:
    server = Server()
    for _ in range(300):
        server.submit(request(100, 100, tenant="early"))
        server.round()
    for _ in range(40):
        for tenant in ("early", "late"):
            server.submit(request(100, 100, tenant=tenant))
    for _ in range(40):
        server.round()
    work = server.work(300)
    assert abs(work["early"] - work["late"]) <= 400


def test_what_others_left_unused_is_not_held_against_whoever_used_it() -> None:
    """A tenant whose one request goes on and on has a share that it does not use."""
    server = Server(seats=2)
    server.submit(request(10, 10, tenant="quiet"))
    server.round()
    quiet = server.running.pop()
    server.seats = 1
    for _ in range(140):
        server.submit(request(100, 100, tenant="early"))
    for _ in range(100):
        server.round()
    for _ in range(40):
        server.submit(request(100, 100, tenant="late"))
    for _ in range(40):
        server.round()
    work = server.work(101)
    assert abs(work["early"] - work["late"]) <= 800
    assert quiet in server.begun


def test_who_was_ahead_of_its_share_is_remembered_though_it_left() -> None:
    shares = FairShare()
    first = [request(1000, 1000, tenant=f"{i}") for i in range(4)]
    stays = [request(10, 10, tenant="stays") for _ in range(3)]
    for one in [*first, *stays]:
        one.rank = shares.rank(one)
    for one in first:
        shares.begins(one)
    for one in first:
        one.tokens += [0] * 1000
        shares.ends(one)
    for one in stays:
        shares.begins(one)
        assert len(shares._tenants) >= 5
    assert shares.rank(request(1, 1, tenant="0"))[0] == 2000
    assert shares.rank(request(1, 1, tenant="new"))[0] == shares.now < 2000


def test_answers_are_charged_as_they_were() -> None:
    """Both ask for long answers, one's end early: in the long run both get the same, though all was expected alike."""
    server = Server()
    answers, work = {"short": 20, "long": 1000}, Counter[str]()
    for turn in range(3000):
        for tenant in answers:
            while sum(r.tenant == tenant for _, r in server.queue) < 30:
                server.submit(request(10, 10 * EXPECTED_ANSWER, tenant=tenant))
        if server.running:
            one = server.running.pop()
            work[one.tenant] += (10 + answers[one.tenant]) * (turn > 1500)
            server.end(one, answers[one.tenant])
        server.round()
    assert work["short"] > 20_000
    assert work["short"] == pytest.approx(work["long"], rel=0.1)


def test_a_priority_goes_first_and_ages() -> None:
    server = Server()
    plain = [server.submit(request(100, 100)) for _ in range(200)]
    urgent = server.submit(request(100, 100, priority=1))
    late = server.submit(request(100, 100, priority=-1))
    overtaken = next(i for i, r in enumerate(plain) if r.rank > urgent.rank)
    assert (200 - overtaken) == PRIORITY_TOKENS // 200, "a class is worth so many tokens of others"
    assert late.rank > plain[-1].rank
    for _ in range(203):
        server.round()
    assert {urgent, late} <= set(server.begun)


def test_a_low_priority_does_not_hurry_newcomers_on() -> None:
    """It is begun on an idle machine; whoever comes then goes before all that it still has waiting."""
    server = Server()
    for _ in range(10):
        server.submit(request(100, 100, tenant="low", priority=-1))
    server.round()
    one = server.submit(request(100, 100, tenant="one"))
    server.round()
    assert server.begun[-1] is one


HOSTILE = {
    "fresh tenants": lambda n: {"tenant": f"fresh {n}"},
    "urgent": lambda n: {"tenant": "urgent", "priority": 100},
    "fresh urgent tenants": lambda n: {"tenant": f"fresh {n}", "priority": 100},
    "the same tenant, urgent": lambda n: {"priority": 100},
}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("cost", [2, 400])
@pytest.mark.parametrize("alive", [1, 30])
def test_nobody_waits_for_ever(how: str, cost: int, alive: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than can be served comes without end, always before it; the last of many, of low priority, has its turn."""
    monkeypatch.setattr(turns, "PRIORITY_TOKENS", 20)
    server = Server(seats=alive)
    for _ in range(20):
        last = server.submit(request(300, 50, priority=-1))
    numbers = itertools.count()
    tags = 20 * 350 + 101 * 20
    tenants = alive + 40
    bound = tags * tenants // cost + 2 * tenants  # that much virtual time passes with so many tenants here
    for _ in range(bound):
        while len(server.queue) < 30:
            server.submit(request(cost // 2, cost - cost // 2, **HOSTILE[how](next(numbers))))
        server.round(answer=cost // 2)
        if server.begun[-1] is last:
            break
    assert server.begun[-1] is last
    assert len(server.begun) > 20


def test_tenants_are_forgotten() -> None:
    rng = random.Random(3)
    server = Server(seats=8)
    most = 0
    for n in range(5000):
        server.submit(request(rng.choice((1, 50, 2000)), rng.choice((1, 200)), tenant=f"{n}"))
        server.round(answer=1)
        most = max(most, len(server.turns._tenants))
    assert most < 100
    while server.queue:
        server.round()
    for one in server.running:
        server.end(one)
    assert not server.turns._tenants
    assert server.turns._active == 0


def test_ranks_are_unique_and_siblings_pay_for_the_prompt_once() -> None:
    shares = FairShare()
    family = [request(1000, 10, choice=i) for i in range(4)]
    for one in family:
        one.order = family[0].order
    ranks = [shares.rank(one) for one in family]
    assert ranks == sorted(set(ranks))
    assert ranks[3][0] - ranks[1][0] == 20
    after = shares.rank(request(1000, 10))
    assert after > ranks[-1]


def test_a_text_in_windows_is_charged_with_what_is_computed_of_it() -> None:
    shares = FairShare()
    shares.rank(request(tenant="b"))
    family = [request(1000, 100, tenant="a", choice=i, windows=Windows(64)) for i in range(2)]
    for one in family:
        one.rank = shares.rank(one)
    assert all(32 <= one.reads < 64 for one in family)
    for one in family:
        shares.begins(one)
    expected = shares.now
    assert expected == family[0].reads + 100 + 50, "the prompt once; half of what runs is another tenant's"
    for one in family:
        for token in range(100):
            one.hear((token % VOCAB,))
            if one.over:
                one.slide()
        assert one.length == 1100
        shares.ends(one)
    assert shares.now == expected, "nothing was expected wrongly"


def test_who_leaves_the_queue_gives_back_its_share() -> None:
    server = Server()
    for _ in range(50):
        server.submit(request(500, 250, tenant="b"))
    gone = [server.submit(request(500, 250, tenant="a")) for _ in range(40)]
    server.queue = [(rank, r) for rank, r in server.queue if r.tenant == "b"]
    heapq.heapify(server.queue)
    for one in gone:
        server.turns.ends(one)
    server.submit(request(500, 250, tenant="a"))
    for _ in range(3):
        server.round()
    assert "a" in {r.tenant for r in server.begun}


# In the scheduler


def hostile_steps(rig: Rig, **who: Any) -> Iterator[int]:
    for step in range(3000):
        tenant = who.get("tenant", f"fresh {step}")
        rig.submit([step % VOCAB] * who.get("prompt", 40), max_tokens=1, tenant=tenant, priority=who.get("priority", 0))
        rig.step()
        yield step


@pytest.mark.parametrize("who", [{}, {"tenant": "flood"}, {"priority": 1}, {"prompt": 2}], ids=str)
def test_k7_newcomers_before_a_long_prompt_and_a_short_one(who: dict[str, Any]) -> None:
    """Endless others, of new tenants each or of one, or urgent: the long prompt gets through, and so does the short."""
    rig = Rig(count=600, block=4, budget=64, rows=8, context=600)
    for i in range(10):
        rig.submit([i, *range(10)] * 20, max_tokens=4, tenant="mine")
    long = rig.submit([7] * 500, max_tokens=1, tenant="mine")
    short = rig.submit([7] * 5, max_tokens=3, tenant="mine")
    for _ in hostile_steps(rig, **who):
        if all((user, 0) in rig.got and rig.got[user, 0].finish for user in (long, short)):
            break
    assert rig.got[long, 0].finish
    assert rig.got[short, 0] == rig.naive([7] * 5, max_tokens=3)


class Counting(FairShare):
    def __init__(self) -> None:
        super().__init__()
        self.heard: Counter[tuple[str, int]] = Counter()

    def begins(self, request: Request) -> None:
        self.heard["begins", request.id] += 1
        super().begins(request)

    def ends(self, request: Request) -> None:
        self.heard["ends", request.id] += 1
        super().ends(request)


def test_each_request_begins_once_and_ends_once() -> None:
    """Preempted, aborted while it runs and while it waits."""
    rig = Rig(count=9, block=4, budget=64, rows=4, turns=Counting())
    users = [rig.submit([i] * 8, max_tokens=20) for i in range(6)]
    rig.step()
    rig.abort(users[0])
    rig.abort(users[-1])
    rig.run()
    assert rig.scheduler.stats().preemptions > 0
    heard = rig.scheduler.turns.heard
    assert heard == Counter({("begins", i): 1 for i in range(5)} | {("ends", i): 1 for i in range(6)})
    assert rig.scheduler._rate.per_second(time.monotonic())[0] == pytest.approx(5, rel=0.5)


def test_shares_of_the_engine() -> None:
    """One tenant has 60 requests waiting, another comes with three: they are answered among its first."""
    rig = Rig(count=400, budget=16, rows=4)
    flood = [rig.submit([i % VOCAB] * 12, max_tokens=8, tenant="flood") for i in range(60)]
    for _ in range(5):
        rig.step()
    few = [rig.submit([i] * 12, max_tokens=8, tenant="few") for i in range(3)]
    while not all((u, 0) in rig.got and rig.got[u, 0].finish for u in few):
        rig.step()
    assert sum((u, 0) in rig.got for u in flood) < 20
    rig.run()


def test_waiting_tokens_and_the_rate() -> None:
    rig = Rig(rows=2, count=100)
    rig.submit([1] * 10, n=3, max_tokens=4)
    rig.submit([2] * 7, max_tokens=4)
    stats = rig.scheduler.stats()
    assert (stats.waiting, stats.waiting_tokens) == (4, 17)
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (2, 2, 7)
    assert stats.begin_rate == pytest.approx(2, rel=0.5)
    assert stats.begin_token_rate == pytest.approx(10, rel=0.5)
    rig.run()
    assert rig.scheduler.stats().waiting_tokens == 0


def test_rate_over_the_last_minute() -> None:
    rate = Rate()
    assert rate.per_second(1000.0) == (0.0, 0.0)
    for second in range(200):
        rate.add(1000.0 + second, 30)
        rate.add(1000.5 + second, 50)
    choices, tokens = rate.per_second(1200.0)
    assert choices == pytest.approx(2, rel=0.05)
    assert tokens == pytest.approx(80, rel=0.05)
    assert len(rate._seconds) <= 61
    assert rate.per_second(1300.0) == (0.0, 0.0)


def test_counts_by_tenant_are_what_was_begun() -> None:
    """`FairShare` in random use: its books close."""
    for seed in range(30):
        rng = random.Random(seed)
        server = Server(seats=rng.randint(1, 5))
        live: dict[str, int] = defaultdict(int)
        for _ in range(300):
            if rng.random() < 0.5:
                who = {"tenant": rng.choice("abcde"), "priority": rng.randint(-3, 3)}
                server.submit(request(rng.randint(1, 50), rng.randint(0, 50), **who))
            else:
                server.round()
            live.clear()
            for one in [*server.running, *(r for _, r in server.queue)]:
                live[one.tenant] += 1
            books = {name: t.live for name, t in server.turns._tenants.items() if t.live}
            assert books == dict(live)
            assert server.turns._active == len(live)
