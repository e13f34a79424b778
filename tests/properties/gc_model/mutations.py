"""Each promise taken back, where that is seen first, and what it comes to; None: nothing, the promise is not needed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tests.properties.gc_model.protocol import Protocol
from tests.properties.gc_model.search import Outcome, Scenario, search
from tests.properties.gc_model.world import lost

# The kinds of violation, worst first.
KINDS = ("gone", "lost", "broken", "untimely", "repeated", "garbage")


class Mutation(NamedTuple):
    """A promise that is not kept, the scenario that shows it, the violation, and its fewest steps."""

    promise: str
    scenario: str
    kind: str | None
    steps: int = 0


MUTATIONS = (
    # Roots
    Mutation("heads_keep", "names", "lost", 4),
    Mutation("tags_keep", "names", "lost", 4),
    Mutation("reflogs_keep", "names", "lost", 4),
    Mutation("coming_moves_keep", "asleep", "lost", 14),
    Mutation("first_moves_keep", "asleep", "lost", 11),
    Mutation("holds_keep", "names", "lost", 4),
    Mutation("leases_keep", "builders", "broken", 6),
    Mutation("leased_snapshots_reach", "readers", "broken", 9),
    Mutation("reflogs_expire", "names", "garbage", 3),
    Mutation("ages_from_replacement", "moves", "untimely", 7),
    Mutation("removal_forgets_the_reflog", "names", "garbage", 4),
    Mutation("young_actions_keep", "actions", "untimely", 4),
    Mutation("old_actions_keep_nothing", "actions", "garbage", 5),
    Mutation("actions_are_replaced", "actions", "untimely", 9),
    # Writers
    Mutation("reserves", "builders", "broken", 6),
    Mutation("reserves_before_looking", "builders", "broken", 6),
    Mutation("looks_at_files", "actions", "broken", 2),
    Mutation("restores", "builders", "repeated", 2),
    Mutation("writers_notice", "sleeper", "broken", 8),
    Mutation("reserves_again", "sleeper", "broken", 8),
    Mutation("writers_lock", "builders", "broken", 7),
    Mutation("publish_looks", "sleeper", "lost", 11),
    Mutation("publishes_in_one_hold", "sleeper", "lost", 12),
    Mutation("names_last", "builders", "lost", 4),
    Mutation("moves_log_what_was", "moves", "untimely", 6),
    Mutation("looks_once_more", "asleep", "lost", 11),
    Mutation("last_look_locks", "asleep", "lost", 11),
    Mutation("closes_last", "builders", "broken", 9),
    Mutation("tagging_looks", "builders", "lost", 7),
    Mutation("copies_reserve_what_is_there", "copy", "broken", 6),
    # Readers
    Mutation("readers_name_before_looking", "readers", "broken", 8),
    Mutation("readers_lock", "readers", "broken", 10),
    Mutation("readers_notice", "readers", "broken", 10),
    Mutation("followers_take_up_what_they_named", "follower", "broken", 15),
    Mutation("build_files_live_with_their_lease", "follower", "broken", 7),
    # Leases
    Mutation("refreshes", "lives", "broken", 2),
    Mutation("needs_a_free_lock", "lives", "broken", 1),
    Mutation("needs_a_process_gone", "lives", "broken", 1),
    Mutation("elsewhere_an_hour", "lives", "garbage", 5),
    Mutation("forked_children_close", "lives", "garbage", 5),
    Mutation("dead_leases_keep_nothing", "lives", "garbage", 2),
    Mutation("torn_tails_are_ignored", "lease file", "broken", 2),
    Mutation("failed_appends_are_cut", "lease file", "broken", 3),
    Mutation("folders_go_with_their_lease", "folder", "broken", 4),
    # Collector
    Mutation("one_at_a_time", "collectors", "garbage", 10),
    Mutation("roots_in_one_hold", "builders", None),
    Mutation("lists_before_marking", "readers", "broken", 18),
    Mutation("stops_at_damage", "names", "lost", 4),
    Mutation("forgets_before_trashing", "moves", "garbage", 8),
    Mutation("forgets_what_was_planned", "moves", "untimely", 10),
    Mutation("quarantines", "names", "garbage", 6),
    Mutation("spares_the_young", "unnamed", "untimely", 9),
    Mutation("ctime_counts", "unnamed", "untimely", 9),
    Mutation("young_snapshots_reach", "unnamed", "untimely", 9),
    Mutation("collector_locks", "builders", "broken", 7),
    Mutation("rereads_leases", "builders", "broken", 6),
    Mutation("rereads_names", "builders", "lost", 7),
    Mutation("rereads_all_that_is_logged", "moves", "lost", 7),
    Mutation("rereads_births", "unnamed", "untimely", 9),
    Mutation("reaches_what_is_newly_leased", "readers", "broken", 9),
    Mutation("trash_first", "mistakes", "gone", 11),
    Mutation("unlink_rechecks", "mistakes", "gone", 14),
    Mutation("unlinks_aside", "collectors", None),
    Mutation("refuses_without_locks", "no locks", "broken", 7),
    Mutation("one_clock", "lives", "broken", 1),
)

#: A builder's work, and the names: where these are not kept, looking at publication still saves the names.
BOTH_NETS = ("reserves", "reserves_before_looking", "closes_last", "writers_notice", "rereads_leases")


def without(*promises: str) -> Protocol:
    """The protocol with these promises taken back."""
    return replace(Protocol(), **dict.fromkeys(promises, False))


def tried(scenario: Scenario, *promises: str) -> Outcome:
    """The scenario searched without these promises."""
    return search(scenario, without(*promises))


def tried_for_names(scenario: Scenario, *promises: str) -> Outcome:
    """The same, where only what is lost counts."""
    return tried(scenario._replace(violation=lost), *promises)
