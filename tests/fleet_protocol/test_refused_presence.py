"""Who announces itself at a broker that refuses it does so less and less often."""

import math

from fleet_protocol.refused_presence import RefusedPresence


def test_status_and_profile_are_kept_back_longer_each_time():
    """At most once an hour; both are of one attempt."""
    presence = RefusedPresence()
    assert (presence.holds(0.0), presence.due) == (False, math.inf)
    now = 100.0
    waits = []
    for _ in range(6):
        presence.note(now)
        presence.note(now + 1)  # the status, after the profile
        assert presence.holds(now + 1)
        waits.append(presence.due - now)
        now = presence.due
        assert not presence.holds(now)
        assert presence.due == math.inf
    assert waits == [20, 200, 1800, 3600, 3600, 3600]
