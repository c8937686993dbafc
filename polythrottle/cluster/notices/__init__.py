"""Who says that a machine is about to be taken away, behind one poll.

notice        the value, and what follows from it
local         a file, a signal
schedulers    Slurm, Ray
metadata      AWS, Google, Azure: asked only if named, for at most a second, and never with the hard switch off
watching      polls the sources of a node beside its training
"""
