"""The promises of FORMAT 1, section 8, by name; each that is taken back is a mutation of the protocol."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, eq=False)
class Protocol:
    """What the processes promise, in the order of section 8.

    The table in docs/explanation/gc.md leads from each to its rule, to the code that keeps it, and to what happens
    without it.
    """

    # Roots
    heads_keep: bool = True
    tags_keep: bool = True
    reflogs_keep: bool = True
    coming_moves_keep: bool = True
    first_moves_keep: bool = True
    holds_keep: bool = True
    leases_keep: bool = True
    leased_snapshots_reach: bool = True
    reflogs_expire: bool = True
    ages_from_replacement: bool = True
    removal_forgets_the_reflog: bool = True
    young_actions_keep: bool = True
    old_actions_keep_nothing: bool = True
    actions_are_replaced: bool = True

    # Writers
    reserves: bool = True
    reserves_before_looking: bool = True
    looks_at_files: bool = True
    restores: bool = True
    writers_notice: bool = True
    reserves_again: bool = True
    writers_lock: bool = True
    publish_looks: bool = True
    publishes_in_one_hold: bool = True
    names_last: bool = True
    moves_log_what_was: bool = True
    looks_once_more: bool = True
    last_look_locks: bool = True
    closes_last: bool = True
    tagging_looks: bool = True
    copies_reserve_what_is_there: bool = True

    # Readers
    readers_name_before_looking: bool = True
    readers_lock: bool = True
    readers_notice: bool = True
    followers_take_up_what_they_named: bool = True
    build_files_live_with_their_lease: bool = True

    # Leases
    refreshes: bool = True
    needs_a_free_lock: bool = True
    needs_a_process_gone: bool = True
    elsewhere_an_hour: bool = True
    forked_children_close: bool = True
    dead_leases_keep_nothing: bool = True
    torn_tails_are_ignored: bool = True
    failed_appends_are_cut: bool = True
    folders_go_with_their_lease: bool = True

    # Collector
    one_at_a_time: bool = True
    roots_in_one_hold: bool = True
    lists_before_marking: bool = True
    stops_at_damage: bool = True
    forgets_before_trashing: bool = True
    forgets_what_was_planned: bool = True
    quarantines: bool = True
    spares_the_young: bool = True
    ctime_counts: bool = True
    young_snapshots_reach: bool = True
    collector_locks: bool = True
    rereads_leases: bool = True
    rereads_names: bool = True
    rereads_all_that_is_logged: bool = True
    rereads_births: bool = True
    reaches_what_is_newly_leased: bool = True
    unlink_rechecks: bool = True
    unlinks_aside: bool = True
    trash_first: bool = True
    refuses_without_locks: bool = True
    one_clock: bool = True

    #: No promise: whether what is done under a hold is searched step by step, though the lock keeps others out.
    in_pieces: bool = False

    @property
    def holds(self) -> bool:
        """Whether a hold of the store lock keeps the others out: then what is done under it is one step."""
        return self.writers_lock and self.readers_lock and self.collector_locks and not self.in_pieces


PROMISES = tuple(field.name for field in fields(Protocol) if field.default)
