"""What can go wrong. The first argument of each exception is the message, the others are its
attributes, so that they travel between processes."""

from __future__ import annotations


class Error(RuntimeError):
    """The base of all: also what has no class of its own, such as a driver that refuses."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidArgument(Error, ValueError):
    """An argument that cannot work. Nothing was written or submitted."""


class Timeout(Error):
    """Some ranks did not take part in time."""

    @property
    def missing(self) -> list[int]:
        """The ranks that were waited for in vain."""
        return self.args[1]

    @property
    def epoch(self) -> int | None:
        """The call, counted from 1; None where it was not a gather."""
        return self.args[2]


class PeerLost(Error):
    """A rank died, left the group, or failed in this generation."""

    @property
    def rank(self) -> int:
        return self.args[1]


class Mismatch(Error):
    """Ranks disagree about something that must be equal on all."""

    @property
    def source(self) -> int:
        """The rank that differs."""
        return self.args[1]

    @property
    def field(self) -> str:
        """What differs."""
        return self.args[2]

    @property
    def ours(self) -> int | str | None:
        """This rank's value; None where only that they differ is known."""
        return self.args[3]

    @property
    def theirs(self) -> int | str | None:
        return self.args[4]

    @property
    def request(self) -> int | None:
        """The request, counted from 0, that the ranks plan in different ways."""
        return self.args[5] if len(self.args) > 5 else None


class SlotInUse(Error):
    """A result is still held that this call would let peers overwrite."""

    @property
    def ubatch(self) -> int:
        return self.args[1]

    @property
    def epoch(self) -> int:
        """The call whose result is held."""
        return self.args[2]


class Aborted(Error):
    """Some rank aborted the group."""

    @property
    def by(self) -> int | None:
        """The rank, where it is known."""
        return self.args[1]


class Poisoned(Error):
    """An earlier call failed, so that this gather is of no more use: rebuild."""


class Excluded(Error):
    """The other ranks rebuilt the group without this one: exit, or join a group built anew."""


class Unsupported(Error):
    """This machine, or the way that was chosen, cannot do what was asked."""
