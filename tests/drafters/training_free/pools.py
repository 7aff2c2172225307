"""A pool of n-grams in plain lists, to which the fast pool and the literal algorithms are held."""


class PlainPool:
    """The published pools: a list for each key, remove and append, cut at the front; 0 n-grams mean no limit."""

    def __init__(self, most):
        self.most, self.grams = most, {}

    def insert(self, key, gram):
        grams, gram = self.grams.setdefault(key, []), tuple(gram)
        if gram in grams:
            grams.remove(gram)
        grams.append(gram)
        if self.most:
            del grams[: -self.most]

    def replace_newest(self, key, grams):
        held = self.grams.setdefault(key, [])
        del held[max(0, len(held) - len(grams)) :]
        for gram in grams:
            self.insert(key, gram)

    def keep_newest(self, count):
        self.grams = {key: grams[max(0, len(grams) - count) :] for key, grams in self.grams.items()}

    def newest(self, key):
        return self.grams.get(key, [])


def held(pool, vocab):
    """The n-grams of each key that has any, in an `NgramPool` or a plain one."""
    return {key: pool.newest(key) for key in range(vocab) if pool.newest(key)}
