"""What came strictly earlier: for every row of a log in order of time, the earlier rows of the same key.

    past = Histories(user, time, limit=100)
    past.events(item, slice(0, 20_000))      # each row's last 100 items, oldest first
    past.sums(click)                         # each row's clicks so far

Rows of one time are not each other's history: which came first is not known.
"""

import numpy as np

from gemctl.data.rows import JaggedRows


class Histories:
    """For each row (in order of time) the rows of the same key that are strictly earlier: a run in `order`.

    `order`: rows sorted by (key, time); row r's history is order[start[r]:stop[r]], oldest first, at most `limit`.
    """

    def __init__(self, key: np.ndarray, time: np.ndarray, limit: int | None = None) -> None:
        count = key.size
        self.order = np.argsort(key, kind="stable")  # rows come in order of time already
        keys, times = key[self.order], time[self.order]
        new_key = np.concatenate([[True], keys[1:] != keys[:-1]])
        new_time = new_key | np.concatenate([[True], times[1:] != times[:-1]])
        self.start, self.stop = np.empty(count, np.int64), np.empty(count, np.int64)
        self.start[self.order] = np.maximum.accumulate(np.where(new_key, np.arange(count), 0))
        self.stop[self.order] = np.maximum.accumulate(np.where(new_time, np.arange(count), 0))
        if limit is not None:
            self.start = np.maximum(self.start, self.stop - limit)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """float64 [N]: for each row the sum of `values` over its history."""
        running = np.concatenate([[0.0], np.cumsum(values[self.order])])
        return running[self.stop] - running[self.start]

    def events(self, values: np.ndarray, rows: slice) -> JaggedRows:
        """The values of the histories of `rows`."""
        start = self.start[rows]
        return JaggedRows(np.zeros(1, np.int64), {"": values[self.order]}).cut(start, self.stop[rows] - start)
