"""The model behind the synthetic click log: users, items, event streams, and the true probability of a click.

    world = ClickWorld(users=5000, items=20000, seed=0)
    rows = world.impressions(np.arange(1000))            # user, item, domain, slot, time
    events = world.histories(rows)                       # what each of these users did before
    p = world.click_probability(rows, world.interest(rows, events))      # float64 [1000]

Row n is a function of (seed, n), and an event of (seed, user, session, position in the session): nothing depends on the
number of rows. Time increases with n.

An item's factors combine those of its category (mostly), its tags and its own; a user's combine those of a segment and
their own. Users act in sessions of six events on one category each, which is either one of their own taste or any. A
click's logit is a sum: a match of the candidate with the history, weighted by recency, dwell and action, and stronger
in some domains (the largest term, which needs the history in order); a match with the user; the item's quality; and
domain, hour × category, slot and price effects.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gemctl.data.hashing import combine, mix64

FACTORS = 8
CATEGORIES, TAGS, SEGMENTS, DOMAINS, ACTIONS, SLOTS = 64, 200, 40, 3, 3, 8
ZIPF = 1.1
START = 1_700_000_000  # seconds since 1970: row 0
SECONDS_PER_ROW = 2.4
DAY = 86_400
SESSION_EVENTS = 6
MIN_EVENTS, MAX_EVENTS = 20, 32
_SESSIONS_BACK = MAX_EVENTS // SESSION_EVENTS + 2  # enough for MAX_EVENTS before any time

# Terms of the logit, tuned for the shares of the gap that the test requires.
BIAS = -1.1
HISTORY_GAIN = np.array([4.0, 2.8, 5.0])  # by domain
DOMAIN_BIAS = np.array([0.0, 0.4, -0.5])
USER_GAIN = 1.8
QUALITY, USER_BIAS, HOUR, PRICE, SLOT = 0.5, 0.35, 0.3, 0.2, 0.1
AGE_SCALE, AGE_POWER = 3600.0, 1.5
DWELL_POWER = 0.5
ACTION_WEIGHT = np.array([0.5, 1.0, 2.0])  # view, click, like
OWN_TASTE = 0.35  # share of sessions with a category of the user's own taste


@dataclass
class Impressions:
    """N rows. Integers are int64 [N] (`time`: seconds since 1970), `row` the row number."""

    row: np.ndarray
    user: np.ndarray
    item: np.ndarray
    domain: np.ndarray
    slot: np.ndarray
    time: np.ndarray


@dataclass
class Events:
    """The last events of N rows, right-aligned in [N, MAX_EVENTS]: row n uses the last `length[n]` columns."""

    item: np.ndarray
    action: np.ndarray
    dwell: np.ndarray  # seconds, float32
    time: np.ndarray
    length: np.ndarray

    def present(self) -> np.ndarray:
        """bool [N, MAX_EVENTS]."""
        return np.arange(MAX_EVENTS) >= MAX_EVENTS - self.length[:, None]


class ClickWorld:
    """A fixed population; all methods are vectorised and draw by hashing, without a generator's state."""

    def __init__(self, users: int, items: int, seed: int) -> None:
        self.users, self.items, self.seed = users, items, seed
        self.category_factors = _unit(self._normal("category", np.arange(CATEGORIES), FACTORS))
        self.item_category = (self._hash("item category", np.arange(items)) % np.uint64(CATEGORIES)).astype(np.int64)
        self.item_tags = self._item_tags()
        tags = _unit(self._normal("tag", np.arange(TAGS), FACTORS))
        self.item_factors = _unit(
            0.9 * self.category_factors[self.item_category]
            + 0.4 * _unit(tags[self.item_tags].sum(axis=1))
            + 0.3 * _unit(self._normal("item", np.arange(items), FACTORS))
        ).astype(np.float32)
        self.item_price = np.exp(self._normal("price", np.arange(items), 1)[:, 0] * 0.8 + 3).astype(np.float32)
        shared = self._normal("category quality", np.arange(CATEGORIES), 1)[:, 0]
        self.item_quality = 0.8 * shared[self.item_category] + 0.6 * self._normal("quality", np.arange(items), 1)[:, 0]
        self.user_segment = (self._hash("segment of", np.arange(users)) % np.uint64(SEGMENTS)).astype(np.int64)
        segments = _unit(self._normal("segment", np.arange(SEGMENTS), FACTORS))
        self.user_factors = _unit(
            0.8 * segments[self.user_segment] + 0.6 * _unit(self._normal("user", np.arange(users), FACTORS))
        ).astype(np.float32)
        self.user_bias = self._normal("user bias", np.arange(users), 1)[:, 0]
        self.user_session = 4 * 3600 + (self._hash("pace", np.arange(users)) % np.uint64(8 * 3600)).astype(np.int64)
        self.hour_phase = self._uniform("phase", np.arange(CATEGORIES)) * 24

    def impressions(self, row: np.ndarray) -> Impressions:
        """The rows with these numbers (int64 [N], ≥ 0)."""
        # small numbers a little more often, so that users differ in activity
        user = (self._uniform("who", row) ** 1.3 * self.users).astype(np.int64)
        item = np.searchsorted(self._popularity, self._uniform("what", row) * self._popularity[-1], side="right")
        domain = np.searchsorted([0.5, 0.8], self._uniform("where", row), side="right")
        slot = (self._hash("slot", row) % np.uint64(SLOTS)).astype(np.int64)
        time = START + (row * SECONDS_PER_ROW).astype(np.int64)
        return Impressions(row, user, np.minimum(item, self.items - 1), domain, slot, time)

    def histories(self, rows: Impressions) -> Events:
        """The last MIN_EVENTS … MAX_EVENTS events of each row's user strictly before its time."""
        users, of_row = np.unique(rows.user, return_inverse=True)
        pace = self.user_session[users]
        session = (rows.time - START) // pace[of_row]  # that contains the row
        first = np.full(users.size, np.iinfo(np.int64).max)
        np.minimum.at(first, of_row, session)
        first -= _SESSIONS_BACK
        count = int((session - first[of_row]).max()) + 1
        stream = self._stream(users, first, count)
        width = count * SESSION_EVENTS
        begun = (session - first[of_row]) * SESSION_EVENTS
        current = of_row[:, None] * width + begun[:, None] + np.arange(SESSION_EVENTS)
        end = of_row * width + begun + (stream.time[current] < rows.time[:, None]).sum(axis=1)
        index = end[:, None] + np.arange(-MAX_EVENTS, 0)
        spread = np.uint64(MAX_EVENTS - MIN_EVENTS + 1)
        length = MIN_EVENTS + (self._hash("length", rows.row) % spread).astype(np.int64)
        return Events(stream.item[index], stream.action[index], stream.dwell[index], stream.time[index], length)

    def click_probability(self, rows: Impressions, interest: np.ndarray) -> np.ndarray:
        """float64 [N]: the true probability of a click, given the rows and their `interest` [N, FACTORS]."""
        category = self.item_category[rows.item]
        candidate = self.item_factors[rows.item]
        hour = (rows.time % DAY) / 3600
        logit = BIAS + DOMAIN_BIAS[rows.domain] - SLOT * rows.slot
        logit += QUALITY * self.item_quality[rows.item] - PRICE * (np.log(self.item_price[rows.item]) - 3)
        logit += HOUR * np.sin((hour - self.hour_phase[category]) * (2 * np.pi / 24))
        logit += USER_BIAS * self.user_bias[rows.user]
        logit += USER_GAIN * (candidate * self.user_factors[rows.user]).sum(axis=1)
        logit += HISTORY_GAIN[rows.domain] * (candidate * interest).sum(axis=1)
        return 1 / (1 + np.exp(-logit))

    def interest(self, rows: Impressions, events: Events) -> np.ndarray:
        """float32 [N, FACTORS]: mean of the events' factors, weighted by (age + 1 h)^−1.5 · √dwell · action."""
        age = (rows.time[:, None] - events.time).astype(np.float32)
        weight = np.exp(-AGE_POWER * np.log(age + np.float32(AGE_SCALE)) + DWELL_POWER * np.log(events.dwell))
        weight *= ACTION_WEIGHT.astype(np.float32)[events.action] * events.present()
        weight /= weight.sum(axis=1, keepdims=True)
        return np.einsum("ne,nef->nf", weight, self.item_factors[events.item])

    def clicks(self, rows: Impressions, probability: np.ndarray) -> np.ndarray:
        """bool [N]: drawn with these probabilities."""
        return self._uniform("click", rows.row) < probability

    def conversions(self, rows: Impressions) -> np.ndarray:
        """bool [N]: whether a click would convert; more likely for cheap, good items that match the user."""
        fit = (self.item_factors[rows.item] * self.user_factors[rows.user]).sum(axis=1)
        price = np.log(self.item_price[rows.item]) - 3
        logit = -1.2 + 1.5 * fit - 0.6 * price + 0.4 * self.item_quality[rows.item]
        return self._uniform("conversion", rows.row) < 1 / (1 + np.exp(-logit))

    @cached_property
    def _popularity(self) -> np.ndarray:
        """Running sum of the items' Zipf weights: item 0 is the most popular."""
        return np.cumsum(np.arange(1, self.items + 1) ** -ZIPF)

    @cached_property
    def _shelves(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items sorted by category, the running sum of their weights, and its value where each category starts
        [CATEGORIES+1]."""
        order = np.argsort(self.item_category, kind="stable")
        running = np.cumsum((order + 1.0) ** -ZIPF)
        ends = np.searchsorted(self.item_category[order], np.arange(CATEGORIES), side="right")
        return order, running, np.concatenate([[0.0], np.concatenate([[0.0], running])[ends]])

    @cached_property
    def _topics(self) -> tuple[np.ndarray, np.ndarray]:
        """Categories by equal shares of probability: of any user [1024], and of each user's own taste [users, 256]."""
        _, _, begin = self._shelves
        mass = np.sqrt(np.diff(begin))
        anyone = np.searchsorted(np.cumsum(mass) / mass.sum(), (np.arange(1024) + 0.5) / 1024)
        taste = mass * np.exp(4 * self.user_factors @ self.category_factors.T.astype(np.float32))
        running = np.cumsum(taste, axis=1)
        running /= running[:, -1:]
        shares = (np.arange(256) + 0.5) / 256
        own = np.zeros((self.users, 256), np.uint8)
        for category in range(CATEGORIES - 1):
            own += running[:, category, None] < shares
        return anyone, own

    def _stream(self, users: np.ndarray, first: np.ndarray, count: int) -> Events:
        """Sessions first … first+count−1 of each user: flat [users·count·SESSION_EVENTS], in time order."""
        user = np.repeat(users, count)
        session = (first[:, None] + np.arange(count)).reshape(-1)
        anyone, own = self._topics
        draw = self._hash("topic", user, session)
        topic = np.where(
            self._uniform("whose", user, session) < OWN_TASTE,
            own[user, (draw >> np.uint64(56)).astype(np.int64)],
            anyone[(draw >> np.uint64(54)).astype(np.int64)],
        )
        pace = self.user_session[user]
        begin = START + session * pace + (self._uniform("begin", user, session) * 0.6 * pace).astype(np.int64)
        gap = (pace * 0.05 * (0.5 + self._uniform("gap", user, session))).astype(np.int64)
        place = np.arange(SESSION_EVENTS)
        time = (begin[:, None] + gap[:, None] * place).reshape(-1)
        key = (user[:, None], session[:, None], place)
        order, running, shelf = self._shelves
        mass = (shelf[topic + 1] - shelf[topic])[:, None]
        chosen = np.searchsorted(running, shelf[topic][:, None] + self._uniform("event", *key) * mass, side="right")
        action = np.searchsorted([0.5, 0.85], self._uniform("action", *key), side="right").reshape(-1)
        dwell = np.exp(2 + action * 0.7 + 0.8 * (self._uniform("dwell", *key).reshape(-1) * 2 - 1))
        item = order[np.minimum(chosen, self.items - 1)].reshape(-1)
        return Events(item, action, dwell.astype(np.float32), time, np.zeros(0, np.int64))

    def _item_tags(self) -> np.ndarray:
        """int64 [items, 2]: two independent tags per item."""
        items = np.arange(self.items)
        return np.stack([(self._hash(f"tag {i}", items) % np.uint64(TAGS)).astype(np.int64) for i in range(2)], axis=1)

    def _hash(self, what: str, *index: np.ndarray) -> np.ndarray:
        """uint64 of the indices' broadcast shape: a random draw that depends only on (seed, what, index)."""
        value = np.array(combine(self.seed, *what.encode()), np.uint64)
        for part in index:
            value = mix64(value ^ part.astype(np.uint64))
        return value

    def _uniform(self, what: str, *index: np.ndarray) -> np.ndarray:
        """float64 in [0, 1)."""
        return (self._hash(what, *index) >> np.uint64(11)) * 2.0**-53

    def _normal(self, what: str, index: np.ndarray, width: int) -> np.ndarray:
        """float64 [N, width], standard normal (Box-Muller)."""
        column = np.arange(width)
        radius = np.sqrt(-2 * np.log(1 - self._uniform(what + " radius", index[:, None], column)))
        return radius * np.cos(2 * np.pi * self._uniform(what + " angle", index[:, None], column))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
