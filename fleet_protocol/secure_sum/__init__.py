"""Secure sums: the server learns the sum of updates, and no single update.

Pairwise masks cancel in the sum, and shares of secrets replace members that drop out.

Keith Bonawitz et al.: "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS
2017, https://doi.org/10.1145/3133956.3133982, figure 4, for honest but curious servers, with two
additions of our own: members may deal bad shares, and sums of one version are opened once. The
devices of a cohort train one plan, so that their entries are the same. In order:

1. every device makes a :class:`Member` and sends its three public keys;
2. it deals shares of its two secrets and of a random number, sealed for each member, which the
   server passes on;
3. every member opens what was dealt to it, and answers a random challenge, which shows whether each
   dealer's shares lie on one polynomial, and nothing of the secrets (`checks`);
4. a dealer that a member accuses opens that one share; the server can make the seal again, so it
   learns which of the two lies, and leaves it out;
5. every member sends its vector of whole numbers, masked with its own mask and with one for each
   other member that is left;
6. the members whose vectors came reveal shares: of the own mask of a member whose vector came, of
   the mask key of another, and never both of one member.

**Sums of one version.** The difference of two sums of one version is the update of the members in
which they differ. Three rules, which the members keep, bound what any combination of sums tells:

- a secret needs the shares of as many members as `threshold` returns, which is at least `least`;
- a member reveals shares of sums that its own update is in, and of no others;
- a device that has revealed shares takes part in no further sum of the same version of a run
  (`device_runtime.agent.opened_sums`).

So each opened sum holds `least` members who know of it, and whose updates are in no later sum of
that version. Every linear combination of opened sums therefore holds the updates of `least` members
alike: those who know of the earliest sum in it.

Whole numbers are counted modulo 2^32, and no sum of `SUM_LIMIT` vectors runs over. Keys and shares
are hexadecimal.
"""

from fleet_protocol.secure_sum.fixed_point import STEPS, Words, restored, whole_numbers
from fleet_protocol.secure_sum.member import Member
from fleet_protocol.secure_sum.sharing import threshold

__all__ = ["STEPS", "Member", "Words", "restored", "threshold", "whole_numbers"]
