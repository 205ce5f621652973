"""Draws a scenario from a seed: which run, with which faults, and when. A seed always gives the same scenario.

    print(draw(17).text())

A scenario is a list of commands (`train`, then `resume`s), each with faults injected into ranks (gemctl/failpoints.py),
deeds done to its processes from outside, and damage to checkpoint files afterwards. The suite adds a final `resume`
without any fault and judges the result.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.chaos.layouts import EVERY, LAYOUTS, STEPS, Layout

POINTS = ("copy", "upload", "hash", "metadata", "manifest", "published", "prune")
ON_RANK_0 = {"metadata", "manifest", "published", "prune"}
DAMAGES = ("cut", "flip", "remove", "swap_ranks", "swap_checkpoints", "swap_folders", "empty", "plant")
SAVES = range(EVERY, STEPS + 1, EVERY)


@dataclass(frozen=True)
class Plant:
    """A fault injected into a rank of the command's attempt number `attempt` (0: its first)."""

    kind: str
    rank: int
    stage: str
    step: int | None = None
    point: str | None = None
    count: int | None = None
    attempt: int = 0

    def text(self, first: int) -> str:
        """In GEMCTL_INJECT's syntax; `first`: number of the command's first attempt."""
        keys = {"rank": self.rank, "stage": self.stage, "attempt": first + self.attempt}
        keys |= {"step": self.step, "point": self.point, "count": self.count}
        return f"{self.kind}:" + ",".join(f"{key}={value}" for key, value in keys.items() if value is not None)


@dataclass(frozen=True)
class When:
    """`delay` seconds after rank `rank` of attempt number `attempt` (0: the command's first) has recorded that it
    entered a stage; or, with `stage` "stopped", after an injected `stop` has stopped it."""

    rank: int
    stage: str
    step: int | None = None
    delay: float = 0.0
    attempt: int = 0


@dataclass(frozen=True)
class Deed:
    """A deed from outside, by its name in tests/chaos/deeds.py; `rank`: its target, for deeds on one rank."""

    what: str
    when: When
    rank: int = 0
    seconds: float = 0.0  # for which processes stay stopped


@dataclass(frozen=True)
class Damage:
    """Damage to files of the `newest`-th newest checkpoint, by its name in tests/chaos/damage.py; `draw`: where."""

    what: str
    file: str
    draw: float
    newest: int = 0


@dataclass(frozen=True)
class Command:
    """`gemctl train` (the first command) or `resume`. `well`: it must exit with 0 in spite of its faults."""

    layout: str
    plants: tuple[Plant, ...] = ()
    deeds: tuple[Deed, ...] = ()
    damage: tuple[Damage, ...] = ()
    budget: int = 0  # recover.budgets.crash
    watchdog: float = 30.0
    well: bool = False


@dataclass(frozen=True)
class Scenario:
    seed: int
    kind: str
    keep: int
    commands: tuple[Command, ...]

    @property
    def refusal(self) -> str:
        """The error with which the last resume may end if every checkpoint has been tampered with."""
        planted = any(one.what == "plant" for command in self.commands for one in command.damage)
        return "refused: it wants to run" if planted else ""

    @property
    def layout(self) -> Layout:
        """The layout of the last command and of the resume after it."""
        return LAYOUTS[self.commands[-1].layout]

    @property
    def changed(self) -> bool:
        """Whether the run has used several layouts, so that rounding may differ."""
        return len({command.layout for command in self.commands}) > 1

    def text(self) -> str:
        """The whole scenario, one line per command."""
        lines = [f"seed {self.seed}: {self.kind}, checkpoint.keep={self.keep}"]
        for number, command in enumerate(self.commands):
            facts = [f"on {command.layout}", f"crash budget {command.budget}", f"watchdog {command.watchdog:.0f} s"]
            facts += [f"plant {plant.text(1)}" for plant in command.plants]
            facts += [_deed_text(deed) for deed in command.deeds]
            facts += [f"then {one.what} {one.file} of the newest but {one.newest}" for one in command.damage]
            lines.append(f"  {'resume' if number else 'train'} " + "; ".join(facts))
        return "\n".join(lines)


def _deed_text(deed: Deed) -> str:
    when = deed.when
    place = f"{when.stage}" + ("" if when.step is None else f" of step {when.step}")
    again = f" of attempt +{when.attempt}" if when.attempt else ""
    held = f" for {deed.seconds:.1f} s" if deed.seconds else ""
    return f"{deed.what} (rank {deed.rank}){held} {when.delay * 1000:.0f} ms after {place} on rank {when.rank}{again}"


def draw(seed: int) -> Scenario:
    """The scenario of a seed. Kinds alternate, and so do the main choices within a kind (`turn`)."""
    dice, (rounds, place) = random.Random(f"chaos {seed}"), divmod(seed, len(TURNS))
    kind = TURNS[place]
    turn = rounds * TURNS.count(kind) + TURNS[:place].count(kind)
    keep, commands = KINDS[kind](dice, dice.choice(list(LAYOUTS.values())), turn)
    return Scenario(seed, kind, keep, commands)


Drawn = tuple[int, tuple[Command, ...]]


def _others(layout: Layout) -> list[Layout]:
    """The other layouts of its family."""
    return [one for one in LAYOUTS.values() if one.family == layout.family and one != layout]


def _instant(dice: random.Random, layout: Layout, attempt: int = 0) -> When:
    """Any moment of an attempt that starts at step 0."""
    stage, step = dice.choice(
        [("build", None), ("load", 0), ("eval", 3), ("close", STEPS)]
        + [("data", dice.randrange(STEPS)), ("eval", 6)]
        + [("step", dice.randrange(STEPS)) for _ in range(4)]
        + [("save", dice.choice(SAVES)) for _ in range(3)]
    )
    return When(dice.randrange(layout.world), stage, step, round(dice.uniform(0, 0.12), 3), attempt)


def _late(dice: random.Random, layout: Layout, least: int = 2) -> When:
    """A moment after the attempt has trained, so that a failed attempt is retried."""
    stage, step = dice.choice([("step", dice.randrange(least, STEPS)), ("save", dice.choice(SAVES))])
    return When(dice.randrange(layout.world), stage, step, round(dice.uniform(0, 0.12), 3))


def _kill(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    what = ["kill_rank", "kill_ranks", "kill_agent", "kill_supervisor", "kill_all"][turn % 5]
    by_itself = what in {"kill_rank", "kill_ranks"} and dice.random() < 0.6
    when = _late(dice, layout) if by_itself else _instant(dice, layout)
    deed = Deed(what, when, dice.randrange(layout.world))
    return dice.choice([1, 2]), (Command(layout.name, deeds=(deed,), budget=int(by_itself), well=by_itself),)


def _kill_in_a_save(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    """With keep=1; a rank stops itself at the point, so that everything is killed exactly there."""
    point = POINTS[turn % len(POINTS)]
    rank = 0 if point in ON_RANK_0 else dice.randrange(layout.world)
    stop = Plant("stop", rank, "save", dice.choice(SAVES[1:]), point)
    deed = Deed(dice.choice(["kill_ranks", "kill_all", "kill_supervisor"]), When(rank, "stopped"))
    return 1, (Command(layout.name, (stop,), (deed,)),)


def _raise(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    rank, well = dice.randrange(layout.world), dice.random() < 0.5
    if well:
        plant = Plant("raise", rank, "step", dice.randrange(1, STEPS))
    elif dice.random() < 0.5:
        point = dice.choice(POINTS)
        plant = Plant("raise", 0 if point in ON_RANK_0 else rank, "save", dice.choice(SAVES), point)
    else:
        when = _instant(dice, layout)
        plant = Plant("raise", rank, when.stage, when.step)
    return dice.choice([1, 2]), (Command(layout.name, (plant,), budget=int(well), well=well),)


def _hang(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    rank = dice.randrange(layout.world)
    if dice.random() < 0.3:
        point = dice.choice(POINTS)
        plant = Plant("hang", 0 if point in ON_RANK_0 else rank, "save", dice.choice(SAVES), point)
        well = False
    else:
        plant, well = Plant("hang", rank, "step", dice.randrange(1, STEPS)), True
    return 2, (Command(layout.name, (plant,), budget=int(well), watchdog=8.0),)


def _stop(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    """Processes are stopped for less than the watchdog's limit, without consequences."""
    what = ["stop_rank", "stop_ranks", "stop_agent", "stop_supervisor", "stop_all"][turn % 5]
    deed = Deed(what, _instant(dice, layout), dice.randrange(layout.world), round(dice.uniform(0.2, 2.5), 2))
    return 2, (Command(layout.name, deeds=(deed,), well=True),)


def _take_over(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    """Everything is stopped, another command takes over the run, and the stopped processes wake up."""
    wakes = ["take_over_then_wake", "wake_in_take_over"][turn % 2]
    if turn % 3:
        point = dice.choice(POINTS)
        rank = 0 if point in ON_RANK_0 else dice.randrange(layout.world)
        plants = (Plant("stop", rank, "save", dice.choice(SAVES), point),)
        return dice.choice([1, 2]), (Command(layout.name, plants, (Deed(wakes, When(rank, "stopped")),)),)
    return dice.choice([1, 2]), (Command(layout.name, deeds=(Deed(wakes, _late(dice, layout)),)),)


def _two_at_once(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    """`resume` of a live run is refused; of two concurrent resumes one wins."""
    if turn % 2:
        return 2, (Command(layout.name, deeds=(Deed("resume_living", _late(dice, layout)),), well=True),)
    killed = Command(layout.name, deeds=(Deed("kill_all", _late(dice, layout)),))
    return 2, (killed, Command(layout.name, deeds=(Deed("resume_too", When(0, "command")),)))


def _disk_full(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    """One rank can't write its file: once (the retry succeeds), twice (the save is tolerated), or permanently."""
    count = [1, 2, 1, 99][turn % 4]
    step = dice.choice(SAVES[:-1] if count == 2 else SAVES)
    plant = Plant("disk_full", dice.randrange(layout.world), "save", step if count < 99 else None, "upload", count)
    return 2, (Command(layout.name, (plant,), well=count < 99),)


def _damage(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    """The newest checkpoints are truncated, corrupted, removed or swapped after the run has ended."""
    what = DAMAGES[turn % len(DAMAGES)]
    file = dice.choice(["data", "data", "metadata", "manifest"])
    count = dice.choice([1, 1, 2])
    damage = tuple(Damage(what, file, dice.random(), newest) for newest in range(count))
    end = Deed(dice.choice(["kill_all", "request_stop"]), When(0, "step", dice.choice([6, 7]), 0.02))
    return 3, (Command(layout.name, deeds=(end,), damage=damage),)


def _damage_while_it_runs(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    """The newest checkpoint is damaged before the command's next attempt, which has to detect it by itself."""
    what = ["flip_and_kill", "cut_and_kill", "remove_and_kill"][turn % 3]
    deed = Deed(what, When(0, "step", dice.randrange(5, STEPS), 0.02), dice.randrange(layout.world))
    return 3, (Command(layout.name, deeds=(deed,), budget=2, well=True),)


def _stop_request(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    what = ["request_stop", "term_supervisor", "int_supervisor", "int_twice", "term_agent", "term_all"][turn % 6]
    return 2, (Command(layout.name, deeds=(Deed(what, _instant(dice, layout)),)),)


def _other_world(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    """Ended in some way, then resumed on another layout."""
    layout = dice.choice([one for one in LAYOUTS.values() if _others(one)])
    what = dice.choice(["kill_all", "kill_rank", "request_stop"])
    first = Command(layout.name, deeds=(Deed(what, _late(dice, layout, 3), dice.randrange(layout.world)),))
    return 2, (first, Command(dice.choice(_others(layout)).name))


def _several(dice: random.Random, layout: Layout, turn: int) -> Drawn:
    """Faults in three attempts of one run, possibly with damage in between."""
    plants = (
        Plant("kill", dice.randrange(layout.world), "step", dice.randrange(2, 5)),
        Plant("raise", dice.randrange(layout.world), "step", dice.randrange(5, STEPS), attempt=1),
    )
    first = Command(layout.name, plants, budget=2, well=True)
    if dice.random() < 0.5:
        return 2, (first,)
    _, (second,) = dice.choice([_kill, _kill_in_a_save, _stop_request, _disk_full])(dice, layout, turn)
    at = Deed("kill_all", When(0, "step", 6, 0.01, attempt=1))
    ended = replace(first, deeds=(at,), plants=plants[:1], well=False)
    return 2, (ended, Command(layout.name, second.plants, second.deeds))


KINDS: dict[str, Callable[[random.Random, Layout, int], Drawn]] = {
    "kill": _kill,
    "kill in a save": _kill_in_a_save,
    "raise": _raise,
    "hang": _hang,
    "stop and go on": _stop,
    "takeover": _take_over,
    "two at once": _two_at_once,
    "disk full": _disk_full,
    "damaged files": _damage,
    "damaged while it runs": _damage_while_it_runs,
    "stop request": _stop_request,
    "other world": _other_world,
    "several": _several,
}
# The kinds of seeds 0, 1, 2 …, repeated.
TURNS = (*KINDS, "kill in a save", "damaged files")
