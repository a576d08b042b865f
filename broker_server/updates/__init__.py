"""The pipeline of an update, from the packet to the sum, module by module.

    packet
      -> service.routing                       the handler of its topic (in a receiver: its own)
      -> service.reassembly                    chunks of one task, until all are there
      -> updates.intake                        opened, decoded, checked, measured: once
      -> store                                 committed; only then the device is informed
      -> updates.folding                       in the order of the devices' ids
      -> stages.moves                          staleness, what rounding took, clipping
      -> updates.combine                       mean, median, trimmed mean, private sum: begin, fold
      -> updates.screens                       when the round closes: norms, weights, Krum
      -> updates.combine                       finish, with a step of the server's optimizer
      -> rounds.new_version                    the next global version

A simulation has no packets: its dispatcher begins at the intake. A secure sum is added before the
folding, as equal updates. `broker_server.settings.combinations` decides which settings are
compatible, by the traits that each of them needs and breaks.
"""
