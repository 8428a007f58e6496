"""Modules, factories, named graphs and graph caches."""

import errno
import logging
import os
import resource

import numpy as np
import popxl
import popxl_addons as addons
import pytest
from helpers.addons_programs import normal, run_program, store_all
from popxl import ops
from popxl.errors import RemoteMemoryError
from popxl_addons.dot_tree import DotTree
from popxl_addons.graph import BoundGraph
from popxl_addons.graph_cache import GraphCache, function
from popxl_addons.named_tensors import NamedTensors, print_named_tensors
from popxl_addons.testing_utils import TensorInput, run_module
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory


class Scale(addons.Module):
    def __init__(self, value=2.0):
        super().__init__()
        self.value = value

    def build(self, x):
        self.scale = self.add_variable_input(
            "scale", lambda: np.full(x.shape[-1:], self.value), x.dtype
        )
        return x * self.scale


class Tower(addons.Module):
    def __init__(self):
        super().__init__()
        self.first = Scale(2.0)
        self.layers = addons.Module.from_list([Scale(3.0), Scale(5.0)])

    def build(self, x):
        self.shift = self.add_variable_input("shift", lambda: np.ones(x.shape[-1]), x.dtype)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x + self.shift


X = normal(2, 3)


def test_variables_are_named_by_attribute_path_and_come_after_the_arguments_in_declaration_order():
    ir = popxl.Ir()
    with ir.main_graph:
        facts, graph = Tower().create_graph(popxl.TensorSpec((2, 3), popxl.float32))
        assert (
            facts.keys_flat()
            == graph.args.keys_flat()
            == ["shift", "first.scale", "layers.0.scale", "layers.1.scale"]
        )
        order = [
            graph.args.shift,
            graph.args.first.scale,
            graph.args.layers[0].scale,
            graph.args.layers[-1].scale,
        ]
        assert list(graph.graph.inputs[1:]) == order
        assert graph.args.first.scale.name == "first/scale"
        assert "(layers.1.scale)" in graph.print_schedule()


def test_one_graph_serves_many_sets_of_variables():
    def build(ir):
        x = popxl.variable(X)
        tower = Tower()
        facts, graph = tower.create_graph(x)
        one, two = facts.init("one"), facts.init("two")
        assert one.layers[1].scale.name == "one.layers.1.scale"
        two.pop("first")
        two.insert("first.scale", popxl.variable(np.full(3, 7.0, np.float32)))
        again, _ = tower.create_graph(x)
        assert again.keys_flat() == facts.keys_flat()
        return [
            *graph.bind(one).call(x),
            *graph.bind(two).call(x),
            *graph.call(x, args=graph.args.to_mapping(one)),
        ]

    one, two, same = run_program(build)
    np.testing.assert_allclose(one, X * 30 + 1, rtol=1e-6)
    np.testing.assert_allclose(two, X * 7 * 15 + 1, rtol=1e-6)
    np.testing.assert_array_equal(same, one)


class Weighed(addons.Module):
    def build(self, a, b, *others, k=None):
        return a + 2 * b + sum((4 * t for t in others), 0 * a) + (8 * k if k is not None else 0)


def test_a_called_module_takes_its_arguments_in_any_order():
    class Outer(addons.Module):
        def build(self, a, b, k):
            (first,) = self.call_module(Weighed(), "first")(b=b, a=a)
            (second,) = self.call_module(Weighed(), "second")(a, k=k, b=b)
            (third,) = self.call_module(Weighed(), "third")(a, b, k, k=k)
            return first, second, third

    def build(ir):
        a, b, k = popxl.variable(1.0), popxl.variable(10.0), popxl.variable(100.0)
        return Outer().create_graph(a, k=k, b=b)[1].call(a, b, k)

    assert [float(y) for y in run_program(build)] == [21.0, 821.0, 1221.0]
    a, b, k = (TensorInput(np.float32(x)) for x in (1, 10, 100))
    assert run_module(Weighed(), k=k, b=b, a=a)[0] == 821.0


def test_an_unknown_way_to_differentiate_a_called_module_is_refused():
    with (
        popxl.Ir().main_graph,
        pytest.raises(ValueError, match="got autodiff 'by hand'; expected 'auto'"),
    ):
        addons.Module().call_module(Scale(), autodiff="by hand")


def test_a_called_graph_can_be_declared_inside_another_module():
    class Outer(addons.Module):
        def __init__(self):
            super().__init__()
            self.inner = Scale(3.0)

        def build(self, x):
            facts, graph = self.inner.create_graph(x)
            for i in range(2):
                (x,) = graph.bind(self.add_variable_inputs(i, facts)).call(x)
            return self.call_module(self.inner)(x)

    def build(ir):
        x = popxl.variable(X)
        facts, graph = Outer().create_graph(x)
        assert facts.keys_flat() == ["0.scale", "1.scale", "Scale.scale"]
        return graph.bind(facts.init()).call(x)

    np.testing.assert_allclose(run_program(build)[0], X * 27, rtol=1e-6)


def test_a_data_source_is_tried_once_looked_at_once_and_then_drawn_per_variable_and_group():
    calls = []

    def draw():
        calls.append(len(calls))
        return np.full((2,), float(calls[-1]))

    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        factory = VariableFactory(
            draw, name="w", replica_grouping=ir.replica_grouping(group_size=2)
        )
        assert calls == [0, 1] and factory.dtype is popxl.float32 and factory.shape == (2,)
        np.testing.assert_array_equal(factory.next_data(), [[1, 1], [2, 2]])
        assert factory.next_data(empty=True).shape == (2, 2)
        assert factory.create_tensor().shape_on_host == (2, 2)
        assert calls == [0, 1, 2, 3, 4]
        from_list = VariableFactory([np.zeros(3), np.ones(3)], popxl.float16, "l")
        assert [from_list.next_data()[0], from_list.next_data()[0]] == [0, 1]


def test_one_number_seen_everywhere_that_a_source_changes_in_place_is_each_draws():
    number = np.zeros((), np.float32)
    everywhere = np.broadcast_to(number, (2, 3))

    def draw():
        number[...] += drawn.pop(0)
        return everywhere

    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        pairs = ir.replica_grouping(group_size=2)
        drawn = [1, 1, 0, 3, 0, 0]
        factory = VariableFactory(draw, popxl.float32, "w", replica_grouping=pairs)
        first, second = factory.next_data(), factory.next_data()
    np.testing.assert_array_equal(first, np.full((2, 2, 3), 2.0))
    np.testing.assert_array_equal(second, np.full((2, 2, 3), 5.0))
    assert not any(first.strides), "it takes no memory"


def test_a_factory_has_a_grouping_of_all_replicas_unless_it_is_given_one():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        pairs = ir.replica_grouping(group_size=2)
        facts, _ = Scale().create_graph(popxl.TensorSpec((2, 3), popxl.float32))
        assert facts.scale.replica_grouping == ir.replica_grouping()
        assert facts.scale.replica_grouping.group_size == 4
        assert (
            VariableFactory(lambda: np.zeros(3), name="w", replica_grouping=pairs).replica_grouping
            is pairs
        )
        assert facts.init().scale.replica_grouping == ir.replica_grouping()
    with pytest.raises(RuntimeError, match="outside any graph"):
        VariableFactory(lambda: np.zeros(3), name="w")


def test_variables_are_made_in_sorted_order_so_that_a_seeded_generator_repeats_them():
    def build(order):
        ir = popxl.Ir()
        rng = np.random.default_rng(0)
        with ir.main_graph:
            facts = NamedVariableFactories()
            for name in order:
                facts.insert(
                    name, VariableFactory(iter([rng.normal(size=2) for _ in range(2)]), name=name)
                )
            return facts.init().keys_flat()

    assert build(["b", "a.x", "c"]) == ["a.x", "b", "c"]


def test_sharded_factories_describe_one_shard():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        factory = VariableFactory(lambda: np.zeros((2, 4)), popxl.float32, "w", shard_over=4)
        assert factory.shape == (2,) and factory.meta_shape == (2, 4) and factory.replica_sharded
        graph = ir.create_empty_graph()
        with graph:
            assert factory.create_input("layer").name == "layer.w"
        assert graph.inputs[0].meta_shape == (2, 4)
        assert factory.create_tensor().meta_shape == (2, 4)


def test_memory_mapped_data_lives_in_a_raw_file(tmp_path):
    ir = popxl.Ir()
    with ir.main_graph:
        facts = NamedVariableFactories(
            w=VariableFactory(iter([np.arange(4.0), np.zeros(4)]), popxl.float32, "w")
        )
        facts.init(memmap_dir=str(tmp_path / "new"))
        path = tmp_path / "new" / "w.npy"
        np.testing.assert_array_equal(np.fromfile(path, np.float32), np.arange(4))
        mapped = facts.w.next_memmap(str(tmp_path / "new"), "w", read_only_if_exists=True)
        np.testing.assert_array_equal(mapped, np.arange(4))
        assert not mapped.flags.writeable


def mapped_in(folder, elements=4, dtype=popxl.float32, **options):
    """A variable in a file of a folder, by a program of its own."""
    ir = popxl.Ir()
    with ir.main_graph:
        return VariableFactory(lambda: np.ones(elements), dtype, "w").next_memmap(
            str(folder), "w", **options
        )


def add_one(folder):
    """A program that adds one to a variable in a file, of 1, 2, 3 and 4 where there is none: its
    session.
    """
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        facts = NamedVariableFactories(
            w=VariableFactory(lambda: np.arange(1.0, 5), popxl.float32, "w")
        )
        buffers = addons.named_variable_buffers(facts, shard_over_dict=False)
        variables = facts.init_remote(buffers, memmap_dir=str(folder))
        w = ops.remote_load(buffers.w, 0)
        w += 1
        ops.remote_store(buffers.w, 0, w)
    return addons.TaskSession([], [], variables, 1, ir, "cpu")


def test_a_program_goes_on_with_the_values_that_the_last_one_left_in_its_files(tmp_path):
    for run in (1, 2, 3):
        with add_one(tmp_path) as session:
            session.run()
        np.testing.assert_array_equal(
            np.fromfile(tmp_path / "w.npy", np.float32), np.arange(1, 5) + run
        )
    assert [path.name for path in tmp_path.iterdir()] == ["w.npy"]


def test_two_programs_map_one_file_and_see_what_the_other_writes(tmp_path):
    first, second = add_one(tmp_path), add_one(tmp_path)
    for session in (first, second, first):
        with session:
            session.run()
    for session in (first, second):
        np.testing.assert_array_equal(session.get_tensor_data(session.state.w), np.arange(1, 5) + 3)


@pytest.mark.parametrize("is_remote", [False, True])
def test_variables_of_one_program_that_would_share_a_file_are_refused(tmp_path, is_remote):
    (tmp_path / "link").symlink_to(tmp_path)
    with popxl.Ir().main_graph:
        facts = NamedVariableFactories(
            w=VariableFactory(iter(np.arange(1.0, 5)[:, None]), popxl.float32, "w")
        )
        buffers = addons.named_variable_buffers(facts, 3, shard_over_dict=False)

        def make(row, prefix=None, folder=tmp_path):
            options = {"prefix": prefix, "memmap_dir": str(folder)}
            return (
                facts.init_remote(buffers, row, **options) if is_remote else facts.init(**options)
            )

        first = make(0)
        for folder in (tmp_path, tmp_path / "link"):
            with pytest.raises(ValueError, match="w.npy, which another variable.* Pass a prefix"):
                make(1, folder=folder)
        others = [make(1, "one"), make(2, "two")]
    assert [v.w.host_value.item() for v in (first, *others)] == [1, 2, 3]


def test_nothing_is_drawn_for_a_file_that_is_there(tmp_path):
    mapped_in(tmp_path)[...] = 7
    with popxl.Ir().main_graph:
        factory = VariableFactory(iter([np.zeros(4)]), popxl.float32, "w")
        for _ in range(2):
            np.testing.assert_array_equal(factory.next_memmap(str(tmp_path), "w"), [7] * 4)
    np.testing.assert_array_equal(mapped_in(tmp_path, empty=True), [7] * 4)


@pytest.mark.parametrize("options", [{}, {"read_only_if_exists": True}, {"empty": True}])
@pytest.mark.parametrize(("other", "size"), [({"elements": 9}, 36), ({"dtype": popxl.float16}, 8)])
def test_a_file_of_another_shape_or_type_is_refused_and_stays_as_it_is(
    tmp_path, other, size, options
):
    mapped_in(tmp_path)[...] = 7
    with pytest.raises(
        ValueError, match=f"variable 'w': got .*w.npy of 16 bytes; expected {size} for float"
    ):
        mapped_in(tmp_path, **other, **options)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "w.npy", np.float32), [7] * 4)


def test_what_a_crashed_program_left_of_a_file_that_it_was_making_is_replaced(tmp_path):
    (tmp_path / "w.npy.part").write_bytes(b"\1" * 99)
    np.testing.assert_array_equal(mapped_in(tmp_path), np.ones(4))
    assert [path.name for path in tmp_path.iterdir()] == ["w.npy"]


def test_a_program_that_is_stopped_while_it_makes_a_file_leaves_none(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", stop)
        mapped_in(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_file_that_cannot_be_mapped_is_an_error_in_words(tmp_path, monkeypatch):
    mapped_in(tmp_path)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        RemoteMemoryError,
        match="w.npy: got 'No space left on device' while mapping a file; expected",
    ):
        mapped_in(tmp_path)


def test_a_disk_without_the_space_for_a_mapped_file_is_an_error_before_anything_is_written(
    tmp_path,
):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            RemoteMemoryError, match="w.npy: got 'File too large' while making a file; expected a"
        ):
            mapped_in(tmp_path, elements=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_takes_no_mapped_file_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        RemoteMemoryError, match="got 'Not a directory' while making a file; expected a folder"
    ):
        mapped_in(tmp_path / "file" / "below")


def test_zeros_are_made_afresh_at_each_execution():
    def build(ir):
        zeros = NamedVariableFactories(
            a=VariableFactory(lambda: np.ones(3), popxl.float32, "a")
        ).init_zero()
        zeros.a += 1
        return [zeros.a]

    np.testing.assert_array_equal(run_program(build)[0], np.ones(3))


def test_graphs_are_shared_for_equal_arguments():
    def double(x, factor):
        return x * factor

    cache = GraphCache()
    ir = popxl.Ir()
    with ir.main_graph:
        spec, other = popxl.TensorSpec((2,), popxl.float32), popxl.TensorSpec((3,), popxl.float32)
        first = cache.create_graph(double, spec, 2.0)
        assert cache.create_graph(double, spec, factor=2.0) is first
        assert cache.create_graph(double, spec, 3.0) is not first
        assert cache.create_graph(double, other, 2.0) is not first

    def build(ir):
        doubled = function(lambda x: x + x)
        x = popxl.variable(X)
        (y,) = doubled(x)
        (z,) = doubled(y)
        assert len(ir.main_graph.called_graphs) == 1
        return [z]

    np.testing.assert_array_equal(run_program(build)[0], 4 * X)


class Masking(addons.Module):
    def build(self, x, mask):
        return x * popxl.constant(mask, x.dtype)


@pytest.mark.parametrize("of", ["module", "cache"])
def test_arrays_share_a_graph_for_as_long_as_their_numbers_are_equal(of):
    masking, cache = Masking(cache=True), GraphCache()
    spec, mask = popxl.TensorSpec((2,), popxl.float32), np.ones(2, np.float32)

    def create(array):
        if of == "module":
            return masking.create_graph(spec, array)[1].graph
        return cache.create_graph(masking, spec, array)

    with popxl.Ir().main_graph:
        first = create(mask)
        assert create(np.ones((2, 3), np.float32)[:, 1]) is first
        mask[:] = 5
        second = create(mask)
        assert second is not first
        assert [c.host_value.tolist() for c in second.constants] == [[5, 5]]
        assert create(np.full(2, 5, np.float32)) is second
        assert create(np.full(2, 5, np.float16)) is not second


def test_functions_of_one_hash_share_their_graphs():
    class Scaling(popxl.Module):
        def __init__(self, factor):
            self.factor = factor

        def build(self, x):
            return x * self.factor

        def __hash__(self):
            return hash(("Scaling", self.factor))

    cache = GraphCache()
    ir = popxl.Ir()
    with ir.main_graph:
        spec = popxl.TensorSpec((2,), popxl.float32)
        graph = cache.create_graph(Scaling(2.0), spec)
        assert cache.create_graph(Scaling(2.0), spec) is graph
        assert cache.create_graph(Scaling(3.0), spec) is not graph
        # each is gone when the next is made
        graphs = [cache.create_graph(lambda x: x + 1, spec) for _ in range(20)]
        assert len(set(graphs)) == 20


def test_a_module_with_cache_gives_one_graph_for_equal_specs():
    class Cached(addons.Module):
        def __init__(self):
            super().__init__(cache=True)

        def build(self, x):
            return x + 1

    ir = popxl.Ir()
    with ir.main_graph:
        module, spec = Cached(), popxl.TensorSpec((2,), popxl.float32)
        assert module.create_graph(spec)[1].graph is module.create_graph(spec)[1].graph


def test_binding_ignores_names_of_one_side_and_bound_graphs_combine():
    def build(ir):
        x = popxl.variable(X)
        facts, graph = Scale(2.0).create_graph(x)
        extra = NamedTensors.from_dict({"scale": facts.init().scale, "unknown": x})
        bound = graph.bind(extra)
        assert (
            isinstance(bound, BoundGraph) and bound.subgraph_io_map(x)[graph.graph.inputs[0]] is x
        )
        with pytest.raises(ValueError, match="scale"):
            graph.call(x)
        return [*bound.bind({graph.args.scale: popxl.variable(np.ones(3, np.float32))}).call(x)]

    np.testing.assert_array_equal(run_program(build)[0], X)


def test_named_tensors_sort_by_tensor_name_and_remap():
    ir = popxl.Ir()
    with ir.main_graph:
        b, a = popxl.variable(1.0, name="b"), popxl.variable(2.0, name="a")
        named = NamedTensors.from_dict({"x.y": b, "z": a})
        assert named.tensors == (a, b) and named.named_tensors == {"x.y": b, "z": a}
        assert named.remap({a: b, b: a}).x.y is a
        with pytest.raises(KeyError):
            named.remap({a: b})


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda: VariableFactory(lambda: 1 / 0, name="w"), ValueError, "ZeroDivisionError"),
        (lambda: VariableFactory(3, name="w"), ValueError, "expected a function"),
        (lambda: VariableFactory(iter([]), name="w"), ValueError, "a data source that fails"),
        (lambda: addons.Module().get("x"), AttributeError, "x"),
        (lambda: addons.Module.from_list([Scale()])[3], IndexError, "got 3"),
        (lambda: addons.Module().build_grad(), NotImplementedError, "no definition"),
        (lambda: DotTree().x, AttributeError, "the tree is empty"),
    ],
)
def test_misuse_of_modules_and_factories_is_refused_in_words(act, error, says):
    with pytest.raises(error, match=says):
        act()


def test_data_that_changes_shape_is_refused():
    with popxl.Ir().main_graph:
        factory = VariableFactory([np.zeros(2), np.zeros(3)], name="w")
    factory.next_data()
    with pytest.raises(ValueError, match=r"expected \[2\], as at first"):
        factory.next_data()


def test_a_variable_cannot_be_declared_twice_in_one_build_and_the_graph_stays_as_it_was():
    class Twice(addons.Module):
        def build(self, x):
            self.add_variable_input("w", lambda: np.zeros(2))
            for name, words in (
                ("w", "which is taken"),
                ("w.x", "'w' is a leaf"),
                ("1st", "expected identifiers or numbers"),
            ):
                with pytest.raises(ValueError, match=words):
                    self.add_variable_input(name, lambda: np.zeros(2))

    ir = popxl.Ir()
    with ir.main_graph:
        _, graph = Twice().create_graph(popxl.TensorSpec((2,), popxl.float32))
    assert [t.name for t in graph.graph.inputs] == ["x", "w"]


def test_tensors_print_only_at_the_chosen_level(monkeypatch, caplog):
    ir = popxl.Ir()
    with ir.main_graph, caplog.at_level(logging.DEBUG):
        t = popxl.variable(1.0)
        assert addons.print_tensor(t) is t
        monkeypatch.setenv("MODEL_LOG_LEVEL", "DEBUG")
        assert addons.print_tensor(t, title="t") is not t
        addons.print_text("hello", level="WARN")
        assert sum(op.definition.name == "print_tensor" for op in ir.main_graph.ops) == 2
        store_all([t])


def test_named_tensors_are_printed_under_their_names(capfd):
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.variable(np.array([1.5, 2], np.float32))
        printed = print_named_tensors(NamedTensors.from_dict({"a.w": t, "b": t + 1}))
        assert printed.keys_flat() == ["a.w", "b"]
    with popxl.Session(ir) as session:
        session.run()
    assert capfd.readouterr().err == "a.w: [1.5 2. ]\nb: [2.5 3. ]\n"
