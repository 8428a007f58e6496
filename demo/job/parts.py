"""The parts of a training run, as PASSES are of the compiler. Where one builds on another, that
comes first; at the end the last is the first.
"""

from popxl_gpt.demo.job.batches import Batches
from popxl_gpt.demo.job.checkpoints import Checkpoints
from popxl_gpt.demo.job.divergence import Divergence
from popxl_gpt.demo.job.growing_batch import GrowingBatch
from popxl_gpt.demo.job.interruptions import Interruptions
from popxl_gpt.demo.job.norms import Norms
from popxl_gpt.demo.job.part import Part
from popxl_gpt.demo.job.profiling import Profiling, RegularProfiles
from popxl_gpt.demo.job.records import Records
from popxl_gpt.demo.job.replica_checks import ReplicaChecks
from popxl_gpt.demo.job.resident_memory import ResidentMemory
from popxl_gpt.demo.job.run_report import Report
from popxl_gpt.demo.job.samples import Samples
from popxl_gpt.demo.job.services import Tensorboard, Wandb
from popxl_gpt.demo.job.step_times import StepTimes
from popxl_gpt.demo.job.validations import Validations

PARTS: "tuple[type[Part], ...]" = (
    Batches,  # reads before others say what they have heard
    Interruptions,
    Profiling,
    RegularProfiles,
    ResidentMemory,
    StepTimes,
    GrowingBatch,
    Validations,
    Records,  # after what was measured of a step
    Norms,
    Samples,
    ReplicaChecks,
    Checkpoints,
    Divergence,  # says more of a failure once all is saved
    Wandb,
    Tensorboard,
    Report,  # closes with what all others have left
)
