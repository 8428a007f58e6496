"""Training for a given time: what is trained is chosen, and the schedule ends with the time.

`choice.py` chooses sizes, batch, rate and precision from data, machine and time. `schedule.py` ends
a run of the schedule wsd by the clock. May import what `execution` may.
"""

from popxl_gpt.execution.planning.minutes.choice import Choice, Text, Trial, chosen, text_of, tried
from popxl_gpt.execution.planning.minutes.schedule import TimedSchedule, since_start

__all__ = ["Choice", "Text", "TimedSchedule", "Trial", "chosen", "since_start", "text_of", "tried"]
