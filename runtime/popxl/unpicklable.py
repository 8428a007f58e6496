"""What belongs to the process that it is made in."""

from typing import NoReturn, SupportsIndex, TypeVar

Part = TypeVar("Part", bound="Unpicklable")


class Unpicklable:
    """Base of what a program is made of. A copy or a pickle of one of its parts would be of all of
    it, and of the engine's.
    """

    def __copy__(self: Part) -> Part:
        """The same one: a program knows its parts by their identity."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """What `pickle` and `copy.deepcopy` ask for. TypeError, which says what to save."""
        raise TypeError(
            f"pickle or copy.deepcopy: got {type(self).__name__}, a part of a program, which "
            "belongs to its process; expected data. Save the values of its variables, with "
            "session.get_tensors_data(ir.main_graph.variables) or TaskSession.save_checkpoint of "
            "popxl_addons, and build the program anew where they are loaded, with "
            "session.write_variables_data."
        )
