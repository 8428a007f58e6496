"""What the processes of a run agree on before they start."""

from itertools import zip_longest

import popdist

from config import Config, UserError, to_yaml, validate
from execution.host import data_share
from utils.log import set_up_logging
from utils.runtime import gather


def check_instances(config: Config) -> bool:
    """Whether this process is instance 0, which speaks for all.

    Raises:
        UserError: the launcher's variables do not fit the configuration, or it is not the same in all processes.
    """
    try:
        is_leader, instances = popdist.getInstanceIndex() == 0, popdist.getNumInstances()
        replicas = popdist.getNumTotalReplicas()
    except (RuntimeError, ValueError) as error:
        raise UserError(str(error)) from error
    set_up_logging(is_leader)
    if popdist.isPopdistEnvSet():
        validate(config, replicas=replicas)
        data_share(config)
    texts = [text.splitlines() for text in gather(to_yaml(config), instances, patiently=True)]
    for number, lines in enumerate(texts):
        for ours, theirs in zip_longest(texts[0], lines, fillvalue=""):
            if ours != theirs:
                raise UserError(
                    f"instances: got '{theirs.strip()}' in instance {number} and '{ours.strip()}' in instance 0; "
                    "expected one configuration. Start all with the same command line."
                )
    return is_leader
