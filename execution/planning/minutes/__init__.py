"""Training for a given time: what is trained is chosen, and the schedule ends with the time.

`choice.py` chooses sizes, batch, rate and precision from data, machine and time. `schedule.py` ends
a run of the schedule wsd by the clock. May import what `execution` may.
"""
