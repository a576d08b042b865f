"""The tables of the papers, run by the simulation and compared with what was published; one module per paper."""
