"""Stop strings: finds the first one in a stream of text, whatever the pieces the text comes in.

Of all stop strings in the text, the match that ends first wins; of those that end together, the longest (the one that
starts first). At any time exactly the longest suffix of the text that begins a stop string is withheld.

Does not belong here: token ids and how they become text (`detokenizer`).
"""

from __future__ import annotations

import re
from functools import lru_cache

_MAX_PAIRS = 8
"""Beyond these, looking for each pair of first characters costs more than the automaton."""


class _Automaton:
    """The Aho-Corasick automaton of a set of strings (Aho and Corasick, 1975). A node is a prefix of a stop string;
    the current node is the longest one that ends the text so far. Never changes once made, so streams share it."""

    __slots__ = ("depth", "fail", "first", "goto", "initials", "match", "only", "pairs")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends at a node
        for stop in stops:
            node = 0
            for character in stop:
                following = self.goto[node].get(character)
                if following is None:
                    following = len(self.goto)
                    self.goto[node][character] = following
                    self.goto.append({})
                    self.depth.append(self.depth[node] + 1)
                    self.match.append(None)
                node = following
            self.match[node] = stop
        self._link()
        self.first = frozenset(self.goto[0])
        # With one first character (one stop string, mostly) `in` and `find` are faster than a set and a pattern.
        self.only = next(iter(self.first)) if len(self.first) == 1 else None
        self.pairs = tuple({stop[:2] for stop in stops})
        self.initials = re.compile("|".join(map(re.escape, self.first)))

    def _link(self) -> None:
        self.fail = [0] * len(self.goto)  # the longest proper suffix of a node that is a node
        queue = list(self.goto[0].values())
        for node in queue:  # breadth first: the list grows while it is read
            for character, following in self.goto[node].items():
                shorter = self.fail[node]
                while shorter and character not in self.goto[shorter]:
                    shorter = self.fail[shorter]
                self.fail[following] = self.goto[shorter].get(character, 0)
                if self.match[following] is None:
                    self.match[following] = self.match[self.fail[following]]
                queue.append(following)

    def ignores(self, text: str) -> bool:
        """Whether a text from node 0 surely ends there, with no match: no stop string begins in its last character,
        and none has both its first two characters in it. Spares the loop where a first character is common."""
        if len(self.pairs) > _MAX_PAIRS or text[-1] in self.first:
            return False
        for pair in self.pairs:  # noqa: SIM110  several times faster than `any`
            if pair in text:
                return False
        return True

    def run(self, node: int, text: str) -> tuple[int, int]:
        """(node, position) after the text, or just after the first match in it. Linear in the text."""
        goto, fail, match, position, end = self.goto, self.fail, self.match, 0, len(text)
        while position < end:
            following = goto[node].get(text[position])
            if following is not None:
                node = following
                position += 1
                if match[node] is not None:
                    return node, position
            elif node:
                node = fail[node]
            else:
                position = self._next_initial(text, position + 1)
        return node, end

    def _next_initial(self, text: str, position: int) -> int:
        if self.only is not None:
            found = text.find(self.only, position)
            return len(text) if found < 0 else found
        start = self.initials.search(text, position)
        return len(text) if start is None else start.start()


_automaton = lru_cache(maxsize=128)(_Automaton)


class StopMatcher:
    """Cuts one stream of text at its first stop string. The stop string itself is kept with `include`."""

    __slots__ = ("_automaton", "_first", "_include", "_node", "_only", "_withheld", "matched")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._automaton = _automaton(stops)
        self._first = self._automaton.first
        self._only = self._automaton.only
        self._include = include
        self._node = 0
        self._withheld = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str, held: str = "") -> str:
        """The text that may be shown now; "" once a stop string was found.

        `held` is text that comes next unless later text replaces it (`TextStream.held`): it is looked into, and is
        part of the stream only if a stop string ends in it.
        """
        if self._node == 0 and not held and self.matched is None:
            # The common case: nothing withheld, and the text begins no stop string.
            if self._only is None:
                if self._first.isdisjoint(text):
                    return text
            elif self._only not in text:
                return text
            if self._automaton.ignores(text):
                return text
        return self._push(text, held)

    def flush(self) -> str:
        """The withheld text, at an ending other than a stop string."""
        text, self._withheld, self._node = self._withheld, "", 0
        return text

    def _push(self, text: str, held: str) -> str:
        if self.matched is not None:
            return ""
        automaton = self._automaton
        node, position = automaton.run(self._node, text)
        if automaton.match[node] is None and held:
            peeked, beyond = automaton.run(node, held)
            if automaton.match[peeked] is not None:
                node, position, text = peeked, len(text) + beyond, text + held
        known = self._withheld + text[:position]
        self.matched = automaton.match[node]
        if self.matched is not None:
            self._withheld, self._node = "", 0
            return known if self._include else known[: len(known) - len(self.matched)]
        self._node = node
        shown = len(known) - automaton.depth[node]
        self._withheld = known[shown:]
        return known[:shown]
