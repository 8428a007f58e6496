"""How the processes of a run start, meet and end: the launcher `poprun`, and what watches them.

Imports the standard library alone; `agent` and `torch_store` import torch, too. `popdist` and the
engine import from here, and nothing here imports them.

`launcher` is the command line, `agent` what starts and watches the instances of a machine,
`die_with_parent` what they run under, `log_mux` what they say; `heartbeat` and `hang_report` find
the instance or the machine that is gone or stuck. `tasks` is what mpirun and srun tell of the
processes that they start. `rendezvous` is where all meet, `store` the values that they see there,
`wire` the connections, `private` the files that no other user has written. `cgroups` and `cores`
tell how much of the machine a process may use.
"""
