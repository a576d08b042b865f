"""Secure sums: the server learns the sum of updates, and no single update.

Pairwise masks cancel in the sum, and shares of secrets replace members that drop out.

Keith Bonawitz et al.: "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS
2017, https://doi.org/10.1145/3133956.3133982, figure 4, for honest but curious servers, with two
additions by Shoal: members may deal bad shares, and sums of one version are opened once. The
devices of a cohort train one plan, so that their entries are the same. In order:

1. every device makes a :class:`Member` and sends its three public keys;
2. it deals shares of its two secrets and of a random number, sealed for each member, which the
  server forwards;
3. every member opens the shares that it received, and answers a random challenge, which shows
  whether each dealer's shares lie on one polynomial, but nothing about the secrets (`checks`);
4. a dealer that a member accuses opens that one share; the server can make the seal again, so it
  learns which of the two cheats, and drops it;
5. every member sends its vector of integers, masked with its own mask and with one for each other
  remaining member;
6. the members whose vectors arrived reveal shares: of the own mask of a member whose vector
  arrived, of the mask key of another, and never both of one member.

**Sums of one version.** The difference of two sums of one version is the update of the members in
which they differ. Three rules, which the members enforce, bound what any combination of sums
reveals:

- a secret needs the shares of `threshold` members, which is at least `least`;
- a member reveals shares only of sums that include its own update;
- a device that has revealed shares takes part in no further sum of the same version of a run
  (`device_runtime.agent.opened_sums`).

So each opened sum includes `least` members that know it, and their updates are in no later sum of
that version. Every linear combination of opened sums therefore includes the updates of `least`
members with equal weight: those of the members that know the earliest sum in it.

Integers are counted modulo 2^32, and no sum of `SUM_LIMIT` vectors overflows. Keys and shares are
hexadecimal.
"""

from fleet_protocol.secure_sum.fixed_point import STEPS, Words, restored, whole_numbers
from fleet_protocol.secure_sum.member import Member
from fleet_protocol.secure_sum.sharing import threshold

__all__ = ["STEPS", "Member", "Words", "restored", "threshold", "whole_numbers"]
