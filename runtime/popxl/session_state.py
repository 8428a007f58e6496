"""The variables of a session: the device's values are its engine's, the host's values are the
program's.
"""

from functools import cached_property

import numpy as np
import popdist
from popdist import exchange

from popxl.backend import DeviceValues
from popxl.ir import Ir
from popxl.session_checks import is_file, is_writable_file
from popxl.tensor import Variable
from popxl.transforms.storage import changing_variables


def keep_state_once(ir: Ir) -> None:
    """Let the state of a program be in memory once: what runs change is the host's value too.

    Without it the host has values of its own, as PopXL's has, and what a run changes is copied
    before it. Sessions that leave the host's values alone when they end
    (``weights_to_host_on_exit=False``) do so nevertheless.

    With it a block that an exception leaves keeps what ran before it; `Session.weights_from_host`
    after a run is an error; writable memory-mapped variables, where one replica holds them, are
    changed in their files by every run.
    """
    ir._check_open("keep_state_once")
    ir.state_once = True


class SessionState:
    """Moves values of variables between the device of a session and the host.

    The host's values of a program are those of one session, its holder: those that its engine has,
    but for variables in `_older`, and for memory-mapped ones, whose values are their files. Outside
    a session's block its engine has them all.

    Args:
        once: see `keep_state_once`.
    """

    def __init__(self, ir: Ir, engine: DeviceValues, once: bool) -> None:
        self._ir, self._engine, self._once = ir, engine, once
        self._older: dict[Variable, np.ndarray] = {}
        """The host's values that the device's are not any more."""
        self.is_changed = False
        """Whether something has run since the host's values were those of the device."""
        self._has_run = False
        """Whether something has run since the device got the host's values."""
        self._is_finished = True
        """Whether what runs before a download has run since the last run."""
        if ir._holder is None:
            ir._holder = self

    @cached_property
    def _changing(self) -> list[Variable]:
        """What a run may change."""
        return changing_variables(self._ir)

    @property
    def _variables(self) -> tuple[Variable, ...]:
        return self._ir.main_graph.variables

    @property
    def _is_shared(self) -> bool:
        """Whether several processes hold the state."""
        return self._ir.replication_factor > self._ir.instance_replication_factor

    def attach(self) -> None:
        """Upload the host's values, unless they are the device's already; another program may have
        changed files.
        """
        holder: SessionState = self._ir._holder
        if holder is self:
            self._make_groups_equal()
        else:
            holder.settle()
            self._is_finished = True
        for variable in self._variables:
            if is_file(variable) and not self._once:
                self._engine.write(variable, np.asarray(variable.host_value))
            elif holder is not self:
                self._engine.write(variable, holder.host_value(variable))
        self._ir._holder, self.is_changed, self._has_run, self._older = self, False, False, {}
        self._engine.upload()

    def begin_run(self) -> None:
        """Copy the values that a run changes."""
        if not (self.is_changed or self._once):
            self._older = {v: self._engine.read(v) for v in self._changing if not is_file(v)}
        self.is_changed = self._has_run = True
        self._is_finished = False

    def finish(self) -> None:
        """Run what runs before a download, unless nothing has run since it did."""
        if not self._is_finished:
            self._engine.finish()
            self._is_finished = True

    def settle(self) -> None:
        """Finish before the host reads or writes values that are the device's, where state exists
        once.
        """
        if self._once:
            self.finish()

    def download(self) -> None:
        """Make the device's values the host's, files included. Every process must call it."""
        self.finish()
        for variable in self._variables:
            if is_writable_file(variable):
                if not self._engine.is_file(variable):
                    self._fill_file(variable, self._engine.read(variable))
                variable.host_value.flush()  # type: ignore[union-attr]
        if any(map(self._engine.is_file, self._variables)):
            self._wait_for_others("the files of variables")
        self._ir._holder, self.is_changed, self._older = self, False, {}

    def upload(self) -> None:
        """Make the host's values the device's.

        Raises:
            RuntimeError: something has run since they were the device's, and state exists once.
        """
        if self._once and self.is_changed:
            raise RuntimeError(
                "Session.weights_from_host: got a call after a run; expected it before, because "
                "state exists once and the run has changed it. Call weights_to_host first, or "
                "build the program without keep_state_once."
            )
        self.restore()
        self._make_groups_equal()
        self._has_run = False
        self._engine.upload()

    def restore(self) -> None:
        """Take back what has run since the last download. Processes need not do it together."""
        for variable in self._changing if self._has_run and not self._once else ():
            if variable in self._older:
                self._engine.write(variable, self._older[variable])
            elif is_file(variable):
                self._engine.write(variable, np.asarray(variable.host_value))
        if not self._once:
            self.is_changed, self._is_finished, self._older = False, True, {}

    def _make_groups_equal(self) -> None:
        """Replicas that share a value may have come to differ: all get the first one's, which is
        the host's.
        """
        for variable in self._changing if self._has_run and not self._once else ():
            if (
                variable.replica_grouping.group_size > 1
                and variable.retrieval_mode == "one_per_group"
            ):
                self._engine.write(variable, self._engine.read(variable))

    def host_value(self, variable: Variable) -> np.ndarray:
        """A copy of the host's value, in the session that holds it."""
        older: np.ndarray | None = self._older.get(variable)
        return self._engine.read(variable) if older is None else np.array(older)

    def set_host_value(self, variable: Variable, data: np.ndarray) -> None:
        """Set the host's value and the device's. Every process must call it."""
        if variable in self._older:
            self._older[variable] = np.array(data)
        if is_file(variable) and not self._engine.is_file(variable):
            self._fill_file(variable, data)
        self._engine.write(variable, data)
        if self._engine.is_file(variable):
            self._wait_for_others(f"the file of %{variable.name}")

    def is_current(self, variable: Variable) -> bool:
        """Whether the host has a variable's value as the device has it."""
        return self._once or not self.is_changed or variable not in self._changing

    def _fill_file(self, variable: Variable, data: np.ndarray) -> None:
        """Instance 0 writes the file that all processes of a program map; the others wait."""
        if not self._is_shared or popdist.getInstanceIndex() == 0:
            variable.host_value[...] = data  # type: ignore[index]
        self._wait_for_others(f"the file of %{variable.name}")

    def _wait_for_others(self, files: str) -> None:
        """Wait until all processes of a program have written what is theirs of files."""
        if self._is_shared:
            exchange.barrier(f"waiting for {files}")
