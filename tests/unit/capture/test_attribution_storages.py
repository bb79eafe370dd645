"""Storages are counted once, whoever holds them."""

import gc

import torch

from meshscope.capture.memory.storages import Ledger, WeakStorages, tensors_in

KIB = 1024


def ledger_of(*claims):
    ledger = Ledger("cpu")
    for category, path, tensor in claims:
        ledger.add_tensor(category, path, tensor)
    ledger.settle()
    return ledger


def test_the_first_category_owns_a_storage():
    weight = torch.zeros(KIB)
    ledger = ledger_of(("parameters", "a", weight), ("gradients", "b", weight.view(2, -1)))
    assert ledger.categories == {"parameters": {"a": 4 * KIB}}
    assert ledger.total_bytes == 4 * KIB


def test_parts_of_one_storage_go_to_their_own_paths_and_the_rest_to_the_first():
    bucket = torch.zeros(100, dtype=torch.uint8)
    ledger = ledger_of(("gradients", "a", bucket[:30]), ("gradients", "b", bucket[30:70]))
    assert ledger.categories == {"gradients": {"a": 60, "b": 40}}


def test_a_saved_slice_holds_its_whole_storage():
    ledger = Ledger("cpu")
    ledger.add_tensor("activations", "a", torch.zeros(KIB)[:1], is_part=False)
    assert ledger.categories == {"activations": {"a": 4 * KIB}}


def test_meta_and_empty_tensors_hold_nothing():
    meta = torch.zeros(KIB, device="meta")
    assert (
        ledger_of(("parameters", "a", meta), ("parameters", "b", torch.zeros(0))).total_bytes == 0
    )


def test_sparse_tensors_are_their_indices_and_values():
    sparse = torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (100,), check_invariants=False)
    assert ledger_of(("gradients", "a", sparse)).total_bytes == 2 * 8 + 2 * 4


def test_what_is_on_another_device_is_apart():
    ledger = Ledger("cuda:0")
    ledger.add_tensor("optimizer_state", "a", torch.zeros(KIB))
    assert ledger.categories == {}
    assert ledger.elsewhere == {"optimizer_state": 4 * KIB}


def test_weak_storages_hold_nothing_and_know_what_is_alive():
    seen = WeakStorages(torch)
    kept, dropped = torch.zeros(KIB), torch.zeros(2 * KIB)
    seen.add("kept", kept)
    seen.add("dropped", dropped)
    seen.add("again", kept[1:])
    assert {(path, size) for path, _, size in seen.alive()} == {
        ("kept", 4 * KIB),
        ("dropped", 8 * KIB),
    }
    del dropped
    gc.collect()
    assert [(path, size) for path, _, size in seen.alive()] == [("kept", 4 * KIB)]
    assert len(seen) == 1


def test_a_storage_that_was_emptied_holds_nothing():
    seen = WeakStorages(torch)
    tensor = torch.zeros(KIB)
    seen.add("a", tensor)
    tensor.untyped_storage().resize_(0)  # as FSDP2 does with gathered parameters
    assert list(seen.alive()) == []


def test_tensors_are_found_in_containers_and_objects_and_cycles_end():
    class Reducer:
        __slots__ = ("bucket", "other")

        def __init__(self):
            self.bucket = {"a": [torch.zeros(1), (torch.zeros(2),)]}
            self.other = self

    assert [t.numel() for t in tensors_in(torch, Reducer(), with_objects=True)] == [1, 2]
    assert list(tensors_in(torch, Reducer())) == []
