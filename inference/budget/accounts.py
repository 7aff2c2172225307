"""Whether drafts pay, by what they have gained."""

from __future__ import annotations

SPEED_DECAY = 0.98  # per draft, of what is known about the speed
GAIN_DECAY = 0.95  # the same in accounts: chance counts more if it is lower, and changes are noticed later if higher
MAX_CREDIT = 12.0  # so much may be lost until drafting stops
FIRST_CREDIT = 8.0  # the same before anything was gained
MAX_DEBT = 32.0  # what a single draft is charged at most, as its time may be measured wrongly
TRIAL_CREDIT = 2.5  # drafting is tried again with this credit
TRIAL_DRAFTS = 2  # at least so many; the first one after a pause takes longer than usual
INTEREST = 0.015  # credit per step: the share of the time that drafts may lose in the long run
MIN_INTEREST = 0.004  # after several trials that did not pay


class Recent:
    """Tokens and seconds of recent steps.

    Args:
        decay: What a step counts after another one, relative to before.
    """

    def __init__(self, decay: float = SPEED_DECAY) -> None:
        self._decay = decay
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        self._tokens = self._decay * self._tokens + tokens
        self._seconds = self._decay * self._seconds + seconds

    def speed(self, vanilla: float) -> float:
        """Tokens per second, together with one step of the base alone that took ``vanilla`` seconds."""
        return (self._tokens + 1) / (self._seconds + vanilla)


class Account:
    """Tells whether something pays, by what it has gained in tokens over what it would replace.

    When its credit is used up, it rests. Each step then earns a little interest, and with enough of it, it is tried
    again. So however bad it is, hardly more than `INTEREST` of the time is lost, apart from `FIRST_CREDIT` steps.
    """

    def __init__(self) -> None:
        self.pays = True
        self._credit, self._interest = FIRST_CREDIT, INTEREST
        self._is_trial = False  # since it was tried again
        self._trial_drafts = 0  # that are left of the trial

    def book(self, gain: float = 0.0) -> bool:
        """Add what a step has gained, 0 where it did not take part; return whether it is tried again from now on."""
        self._credit = min(MAX_CREDIT, max(-MAX_DEBT, self._credit + self._interest + gain))
        if self.pays and gain:
            self._trial_drafts -= 1
        if self.pays and self._credit < 0 and self._trial_drafts <= 0:
            self.close()
        elif not self.pays and self._credit >= TRIAL_CREDIT:
            self.open()
            return True
        elif self._credit == MAX_CREDIT:
            self._is_trial, self._interest = False, INTEREST
        return False

    def open(self) -> None:
        """Try it again."""
        self._credit, self.pays, self._is_trial, self._trial_drafts = TRIAL_CREDIT, True, True, TRIAL_DRAFTS

    def close(self) -> None:
        """Let it rest, whatever its credit is."""
        self._credit, self.pays = min(0.0, self._credit), False
        if self._is_trial:
            self._interest = max(MIN_INTEREST, self._interest / 2)
