"""What an inspection found: one line per subject, and what can be done about it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What was looked at, in a few words: `gpu_max_hz`, `energy`, `secure boot`.
        works: True if it does, False if it does not, None where that cannot be known.
        explanation: What was seen, or why it does not work, in one line without a full stop.
        remedy: What the reader can do about it, in one line; empty where there is nothing to do.

    Raises:
        ValueError: If the subject or the explanation is empty or has more than one line.
    """

    subject: str
    works: bool | None
    explanation: str
    remedy: str = ""

    def __post_init__(self) -> None:
        for text in (self.subject, self.explanation):
            if not text.strip():
                raise ValueError("a finding needs a subject and an explanation")
        if any("\n" in text for text in (self.subject, self.explanation, self.remedy)):
            raise ValueError(f"a finding about {self.subject!r} is one line each")
