"""A pool of n-grams and a corpus cache in plain lists, for tests of the fast ones and of what drafts with them."""

from collections import Counter


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


class PlainCorpus:
    """The lookups of a corpus cache, counted anew for each of them; -1 separates documents."""

    def __init__(self, text, min_count=1, top=None):
        self.text, self.min_count, self.top = text, min_count, top

    def continuations(self, context):
        width, counts = len(context), Counter()
        for i in range(len(self.text) - width - 3):
            if self.text[i : i + width] == context and -1 not in self.text[i : i + width + 4]:
                counts[tuple(self.text[i + width : i + width + 4])] += 1
        often = [gram for gram in counts if counts[gram] >= self.min_count]
        return sorted(often, key=lambda gram: (-counts[gram], gram))[: self.top]

    def retrieve(self, seq, most, excluded=()):
        grams = []
        for width in (4, 3, 2, 1):
            if len(seq) >= width:
                for gram in self.continuations(list(seq[-width:]))[: most - len(grams)]:
                    if gram not in grams and gram not in excluded:
                        grams.append(gram)
        return grams
