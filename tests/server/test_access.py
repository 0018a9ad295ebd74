"""What a caller may do: kinds by patterns, and what one set of rights covers of another."""

import pytest

from leasekit.server.access import Access, KindPatterns


@pytest.mark.parametrize(
    ("patterns", "kind", "is_matched"),
    [
        (["mail"], "mail", True),
        (["mail"], "mail.x", False),
        (["mail"], "mai", False),
        (["mail.*"], "mail.x", True),
        (["mail.*"], "mail.", True),
        (["mail.*"], "mail", False),
        (["a", "b*"], "bee", True),
        (["*"], "anything", True),
        (["*"], None, True),
        (["mail"], None, False),
        ([], "mail", False),
        (["named:*", "once:*"], "named:reports", True),
        (["named:*", "named:leasekit.*", "named:leasekit.queues:mail"], "named:leasekit.queues:mail", False),
        (["o*"], "once:leasekit.x", False),
        (["*"], "named:leasekit.queues:mail", True),
    ],
)
def test_a_pattern_is_exact_or_a_beginning(patterns: list[str], kind: str | None, is_matched: bool) -> None:
    assert KindPatterns(patterns).match(kind) is is_matched


@pytest.mark.parametrize(
    ("patterns", "pattern", "is_covered"),
    [
        (["mail.*"], "mail.*", True),
        (["mail.*"], "mail.x*", True),
        (["mail.*"], "mail*", False),
        (["mail.*"], "mail.x", True),
        (["mail"], "mail", True),
        (["mail"], "mail*", False),
        (["mail"], "mail.x", False),
        (["mail.a", "mail.b"], "mail.*", False),
        (["*"], "*", True),
    ],
)
def test_a_pattern_is_covered_by_one_that_matches_all_of_its_kinds(
    patterns: list[str], pattern: str, is_covered: bool
) -> None:
    assert KindPatterns(patterns).cover(pattern) is is_covered


def test_rights_cover_fewer_scopes_and_kinds_that_end_no_later() -> None:
    access = Access(name="a", scopes=frozenset({"read", "work"}), kinds=KindPatterns(["a*"]), expires_at=9.0)
    assert access.covers(["read"], ["a"], 9.0)
    assert not access.covers(["read", "submit"], ["a"], 9.0)
    assert not access.covers(["read"], ["b"], 9.0)
    assert not access.covers(["read"], ["a"], 9.1)
    assert not access.covers(["read"], ["a"], None)
