"""Dotted trees, the host-side helpers, and arrays cut and laid out for replicas."""

import logging
import os
from collections import OrderedDict

import numpy as np
import popxl
import popxl_addons as addons
import pytest
from popxl_addons import array_munging as am
from popxl_addons.dot_tree import DotTree, sanitise, to_mapping
from popxl_addons.layers import Linear
from popxl_addons.named_replica_grouping import (
    NamedReplicaGrouping,
    fill_none_group,
    get_ild_replica_grouping,
    get_ild_size_from_popdist,
    get_instance_replica_grouping,
    is_cross_ild,
    is_cross_instance,
)
from popxl_addons.utils import OrderedDict as IndexedDict
from popxl_addons.utils import duplicate_items, flat_tensors, overrides, suffix_graph_name, timer


def tree():
    return DotTree.from_dict({"b.w": 1, "b.a": 2, "a": 3, "layers.0": 4, "layers.1.x": 5})


def test_leaves_are_read_by_attribute_by_dotted_name_and_by_number():
    t = tree()
    assert (t.b.w, t["b.a"], t.get("a"), t.layers[0], t.layers[-1].x) == (1, 2, 3, 4, 5)
    assert "b.w" in t and "b.z" not in t and "a.b" not in t


def test_names_and_leaves_come_in_insertion_order_flat_and_sorted_when_unpacked():
    t = tree()
    assert t.keys() == ["b", "a", "layers"] and t.len() == 3
    assert t.keys_flat() == ["b.w", "b.a", "a", "layers.0", "layers.1.x"] and t.len_flat() == 5
    assert t.values_flat() == [1, 2, 3, 4, 5]
    assert t.unpack() == (["a", "b.a", "b.w", "layers.0", "layers.1.x"], [3, 2, 1, 4, 5])
    assert DotTree().unpack() == ([], [])
    assert DotTree.pack(*t.unpack()).to_dict() == dict(t.to_dict())


def test_inserting_copies_the_subtrees_on_the_way():
    t = tree()
    shared = DotTree(inner=t.b)
    shared.insert("inner.new", 9, overwrite=True)
    assert "new" not in t.b and shared.inner.new == 9
    copy = t.copy()
    copy.insert("b.w", 0, overwrite=True)
    assert t.b.w == 1 and copy.b.w == 0
    assert copy.pop("layers.1.x") == 5 and "layers.1.x" in t
    copy.b.w += 5
    assert copy.b.w == 5


def test_a_name_below_one_that_is_there_is_taken_unless_it_is_to_be_merged():
    t = tree()
    for key in ("b.new", "b.w", "layers.1.y", "a.b", "b.new.deep"):
        with pytest.raises(
            ValueError, match=rf"got '{key}', of which '{key[0]}.*' is taken; expected a new name"
        ):
            t.insert(key, 0)
    assert t.to_dict() == tree().to_dict()
    t.insert("b.new.deep", 6, overwrite=True)
    t.insert("b.w", 7, overwrite=True)
    t.insert("layers.1.y", 8, overwrite=True)
    t.insert("c.x", 9)
    assert t.b.to_dict() == {"w": 7, "a": 2, "new.deep": 6}
    assert t.layers.to_dict() == {"0": 4, "1.x": 5, "1.y": 8} and t.c.x == 9
    t.insert("a.b", 10, overwrite=True)
    assert t.a.b == 10


def test_trees_map_filter_and_pair_up_by_name():
    t = tree()
    assert t.map(lambda leaf: leaf * 10).b.w == 10
    assert t.filter_keys(["layers", "b.a"]).keys_flat() == ["layers.0", "layers.1.x", "b.a"]
    other = DotTree.from_dict({"a": "A", "b": {"w": "W", "z": "Z"}})
    assert t.to_mapping(other) == to_mapping(t, other) == {3: "A", 1: "W"}
    assert DotTree(**{"x": DotTree(y=1)}).to_dict() == OrderedDict([("x.y", 1)])
    joined = DotTree(a=1)
    joined.update(DotTree(b=DotTree(c=2)))
    assert joined.keys_flat() == ["a", "b.c"]


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda t: t.insert("a", 0), ValueError, "is taken; expected a new name"),
        (lambda t: t.insert(-1, 0), ValueError, "expected a number from 0 on"),
        (lambda t: t.insert("no-name", 0), ValueError, "expected identifiers or numbers"),
        (lambda t: t.insert("a.b", 0), ValueError, "of which 'a' is taken"),
        (lambda t: t.from_dict({"a": 1, "a.b": 2}), ValueError, "is a leaf"),
        (lambda t: t.from_dict({"a.b": 1, "a": 2}), ValueError, "'a', which is taken"),
        (lambda t: t.get("z"), KeyError, "expected one of b, a, layers"),
        (lambda t: t.layers[5], KeyError, "got 5"),
        (lambda t: t.z, AttributeError, "got 'z'"),
        (lambda t: t.filter_keys(["a", "a"]), ValueError, "more than once"),
        (lambda t: t.filter_keys(["z"]), KeyError, "got 'z'"),
        (lambda t: t.pop("b.z"), KeyError, "got 'b.z'"),
    ],
)
def test_misuse_of_a_tree_is_refused_in_words(act, error, says):
    with pytest.raises(error, match=says):
        act(tree())


def test_small_helpers_do_what_they_say(caplog):
    assert sanitise("a.b/c:0") == "a_b_c_0"
    assert (
        suffix_graph_name("f_subgraph(3)", "grad") == "f_grad"
        and suffix_graph_name("f", "x") == "f_x"
    )
    assert duplicate_items("abca") == ["a"]
    assert IndexedDict(a=1, b=2).idx(1) == 2
    assert overrides(bool, int, "__and__") and not overrides(bool, int, "bit_length")
    with caplog.at_level(logging.INFO, "popxl_addons"), timer("work", log_to_wandb=False):
        pass
    assert "work: 0.0" in caplog.text


def test_groupings_by_name_and_the_part_inside_a_link_domain(monkeypatch):
    ir = popxl.Ir(replication=8)
    monkeypatch.setitem(os.environ, "POPLAR_TARGET_OPTIONS", '{"ipuLinkDomainSize": 4}')
    with ir.main_graph:
        strided = ir.replica_grouping(stride=2, group_size=4)
        assert get_ild_replica_grouping(strided).assignment == [0, 1, 0, 1, 2, 3, 2, 3]
        assert get_ild_replica_grouping().assignment == [0, 0, 0, 0, 1, 1, 1, 1]
        assert is_cross_ild(strided) and not is_cross_ild(ir.replica_grouping(group_size=4))
        assert get_ild_size_from_popdist() == 4
        with pytest.raises(ValueError, match="expected the same part of a group in every domain"):
            get_ild_replica_grouping(ir.replica_grouping_from_assignments([0, 1, 1, 1, 0, 0, 0, 1]))
        monkeypatch.delitem(os.environ, "POPLAR_TARGET_OPTIONS")
        assert get_ild_size_from_popdist() == 8 and not is_cross_ild(strided)
    ir = popxl.Ir(replication=6)
    monkeypatch.setitem(os.environ, "POPLAR_TARGET_OPTIONS", '{"ipuLinkDomainSize": 3}')
    with ir.main_graph:
        assert is_cross_ild(ir.replica_grouping(group_size=2)), "the parts are unequal"
        assert not is_cross_ild(ir.replica_grouping(group_size=3))
        monkeypatch.delitem(os.environ, "POPLAR_TARGET_OPTIONS")
    with popxl.Ir(replication=128).main_graph:
        assert get_ild_size_from_popdist() == 64
    assert fill_none_group(None, strided) is strided and fill_none_group(strided, None) is strided
    assert NamedReplicaGrouping.build_groups(["a.b", "c"], strided).a.b is strided


def test_the_part_of_a_grouping_inside_a_process(monkeypatch):
    """The second of two processes with four replicas each."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "POPDIST_NUM_TOTAL_REPLICAS": "8"}.items():
        monkeypatch.setenv(name, value)
    ir = popxl.Ir(replication="popdist")
    with ir.main_graph:
        strided, local = ir.replica_grouping(stride=2), ir.replica_grouping(stride=2, group_size=2)
        assert get_instance_replica_grouping().assignment == [0, 0, 0, 0, 1, 1, 1, 1]
        assert get_instance_replica_grouping(strided).assignment == [0, 1, 0, 1, 2, 3, 2, 3]
        assert is_cross_instance(strided) and not is_cross_instance(local)
        uneven = ir.replica_grouping_from_assignments([0, 1, 1, 1, 0, 0, 0, 1])
        assert is_cross_instance(uneven)
        with pytest.raises(
            ValueError, match="get_instance_replica_grouping: got .* cut into unequal parts"
        ):
            get_instance_replica_grouping(uneven)


def test_tensors_are_found_in_nested_containers_in_order():
    ir = popxl.Ir()
    with ir.main_graph:
        a, b, c = (popxl.variable(float(i)) for i in range(3))
    assert flat_tensors([a, {"x": (b, 3)}, [[c]], None]) == [a, b, c]


# arrays

X = np.arange(4 * 6, dtype=np.float32).reshape(4, 6)


def test_shards_are_pieces_of_an_axis_and_come_together_again():
    pieces = am.shard(X, 3, axis=1)
    assert pieces.shape == (3, 4, 2)
    np.testing.assert_array_equal(pieces[2], X[:, 4:])
    np.testing.assert_array_equal(am.unshard(pieces, axis=1), X)
    np.testing.assert_array_equal(am.unshard_arrays([p[None] for p in pieces], axis=-1), X)


def test_blocks_over_two_axes_are_numbered_outer_first():
    blocks = am.shard2D(X, 2, 3, 0, 1)
    assert blocks.shape == (6, 2, 2)
    for i in range(2):
        for j in range(3):
            np.testing.assert_array_equal(
                blocks[i * 3 + j], X[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            )
    np.testing.assert_array_equal(am.unshard2D(blocks, 2, 3, 0, 1), X)
    swapped = am.shard2D(X, 3, 2, 1, 0)
    np.testing.assert_array_equal(swapped[1], X[2:, :2])
    np.testing.assert_array_equal(am.unshard2D(swapped, 3, 2, 1, 0), X)


def test_repeats_make_new_axes_or_longer_ones():
    np.testing.assert_array_equal(am.repeat(X, 2, 1), np.stack([X, X], 1))
    np.testing.assert_array_equal(am.repeat_axis(X, 2, 1), np.concatenate([X, X], 1))
    s0, s1 = X[:2], X[2:]
    np.testing.assert_array_equal(am.repeat_shard(X, 2, 2, 0), [s0, s1, s0, s1])
    np.testing.assert_array_equal(am.repeat_shard(X, 2, 2, 0, "strided"), [s0, s0, s1, s1])


def test_samples_go_to_consecutive_tensor_parallel_replicas_and_come_back():
    samples = np.arange(6 * 5).reshape(6, 5)
    laid_out = am.tensor_parallel_input(samples, tp=2, rf=4, repeat_fn=lambda x, i: x + 100 * i)
    assert laid_out.shape == (3, 4, 5)
    for transfer in range(3):
        for replica in range(4):
            expected = samples[transfer * 2 + replica // 2] + 100 * (replica % 2)
            np.testing.assert_array_equal(laid_out[transfer, replica], expected)
    back = am.tensor_parallel_output(laid_out, 3, 2, 4, (5,))
    np.testing.assert_array_equal(back, samples)
    assert am.tensor_parallel_output(laid_out, 3, 2, 4, (5,), tp_identical=False).shape == (12, 5)
    np.testing.assert_array_equal(
        am.tensor_parallel_output(laid_out, 3, 2, 4, (5,), true_num_host_transfers=2), samples[:4]
    )


@pytest.mark.parametrize(
    ("n", "tp", "rf", "shape"),
    [(4, 1, 1, (4, 5)), (2, 2, 4, (4, 5)), (1, 1, 1, (5,)), (4, 4, 4, (4, 4, 5))],
)
def test_leading_axes_of_size_one_are_dropped_as_sessions_expect(n, tp, rf, shape):
    assert am.tensor_parallel_input(np.zeros((n, 5)), tp, rf).shape == shape


def test_padding_and_squeezing_touch_only_what_they_are_told():
    padded = am.pad_axis(X, 8, -1, value=7)
    np.testing.assert_array_equal(padded[:, :6], X)
    assert (padded[:, 6:] == 7).all()
    assert am.squeeze_safe(np.zeros((1, 3, 1)), (0, 1)).shape == (3, 1)
    assert am.squeeze_safe(np.zeros((1, 3, 1))).shape == (3,)
    assert am.handle_negative_axis(X, -1) == 1


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda: am.unshard_arrays([X, X[0]], 0), ValueError, "arrays of one rank"),
        (lambda: am.repeat_shard(X, 2, 2, 0, "other"), ValueError, "'contiguous' or 'strided'"),
        (lambda: am.tensor_parallel_input(X, 8, 4), ValueError, "expected tp to divide rf"),
        (lambda: am.tensor_parallel_input(X, 1, 8), ValueError, "expected a multiple of rf / tp"),
        (
            lambda: am.tensor_parallel_output(X, 1, 3, 4, (6,)),
            ValueError,
            "expected tp to divide rf",
        ),
        (lambda: am.pad_axis(X, 3, 1), ValueError, "expected at most n = 3"),
        (
            lambda: am.handle_negative_axis(np.float32(0).reshape(()), 0),
            IndexError,
            "an axis it has",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_words(act, error, says):
    with pytest.raises(error, match=says):
        act()


def copies_of(make, monkeypatch):
    """How many entries are copied while something is made."""
    copied = []
    mapped = DotTree.map

    def count(tree, fn):
        copied.append(tree.len())
        return mapped(tree, fn)

    with monkeypatch.context() as patch:
        patch.setattr(DotTree, "map", count)
        make()
    return sum(copied)


def test_a_tree_of_many_names_is_made_without_copies(monkeypatch):
    names = {f"layers.{i}.{name}": i for i in range(50) for name in ("weight", "bias")}
    assert copies_of(lambda: DotTree.from_dict(names), monkeypatch) == 0
    shared = DotTree.from_dict({"weight": 1})
    tree = DotTree.from_dict({"a": shared, "a.bias": 2, "a.gain": 3})
    assert tree.keys_flat() == ["a.weight", "a.bias", "a.gain"] and shared.keys_flat() == ["weight"]


def test_building_and_differentiating_a_module_copies_names_linearly(monkeypatch):
    def build(layers):
        class Net(addons.Module):
            def __init__(self):
                super().__init__()
                self.layers = addons.Module.from_list([Linear(2) for _ in range(layers)])

            def build(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x

        with popxl.Ir().main_graph:
            factories, graph = Net().create_graph(popxl.TensorSpec((2, 2), popxl.float32))
            accumulators, _ = addons.autodiff_with_accumulation(graph, graph.args.tensors)
            factories.init()
            accumulators.init_zero()

    few, many = (copies_of(lambda: build(n), monkeypatch) for n in (10, 40))
    assert many <= 5 * few
