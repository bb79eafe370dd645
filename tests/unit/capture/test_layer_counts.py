"""What stages hold: told by the program, or counted in the models that are watched."""

import pytest
import torch
from torch import nn

from meshscope.capture.model.layer_counts import check_stage_layers, count_layers
from meshscope.store.read.run import open_run


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    def forward(self, x):
        return self.inner(x)


class Model(nn.Module):
    def __init__(self, num_blocks):
        super().__init__()
        self.embedding = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


def read(tmp_path):
    return open_run(tmp_path / "run").last_attempt.ranks[0]


def test_the_outermost_list_is_counted_by_class():
    assert count_layers(Model(3)) == {"Block": 3}
    assert count_layers(nn.Sequential(nn.Embedding(4, 2), Block(), Block())) == {
        "Embedding": 1,
        "Block": 2,
    }


def test_a_wrapper_is_looked_through():
    wrapper = nn.Module()
    wrapper.module = Model(2)
    assert count_layers(wrapper) == {"Block": 2}


def test_a_model_without_a_list_has_no_layers():
    assert count_layers(nn.Linear(2, 2)) == {}


def test_numbers_and_names_are_taken():
    given = {0: 4, 3: {"Block": 2, "head": 1}}
    assert check_stage_layers(given) == {"0": {"layer": 4}, "3": {"Block": 2, "head": 1}}


@pytest.mark.parametrize("given", [{0: -1}, {-1: 2}, {0: "four"}, {"a": 1}, {0: {"Block": 1.5}}])
def test_what_is_no_count_is_refused(given):
    with pytest.raises((ValueError, TypeError)):
        check_stage_layers(given)


def test_told_before_the_first_record_it_is_in_the_header(recorder, tmp_path):
    recorder.set_stage_layers({1: {"Block": 2}})
    with recorder.step():
        pass
    recorder.close()
    assert read(tmp_path).header["stage_layers"] == {"1": {"Block": 2}}


def test_told_later_it_is_an_update_with_all_stages(recorder, tmp_path):
    with recorder.step():
        pass
    recorder.set_stage_layers({1: 2})
    recorder.set_stage_layers({5: 3})
    recorder.close()
    told = [u["stage_layers"] for u in read(tmp_path).updates if "stage_layers" in u]
    assert told == [{"1": {"layer": 2}}, {"1": {"layer": 2}, "5": {"layer": 3}}]


def test_nonsense_is_counted_as_an_error_and_does_not_raise(recorder, tmp_path):
    recorder.set_stage_layers({0: -3})
    recorder.set_stage_layers(None)
    assert recorder.guard.counts == {"stage layers": 2}


def test_attached_models_are_counted_once(recorder, tmp_path):
    model = Model(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.attach(model, optimizer)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    recorder.close()
    counted = [u["model_layers"] for u in read(tmp_path).updates if "model_layers" in u]
    assert counted == [[{"Block": 2}]]
    trained = sum(p.numel() * p.element_size() for p in model.parameters())
    stated = [u["parameter_bytes"] for u in read(tmp_path).updates if "parameter_bytes" in u]
    assert stated == [trained]


def test_what_the_program_told_is_not_counted_again(recorder, tmp_path):
    recorder.set_stage_layers({0: 7})
    test_model = Model(2)
    optimizer = torch.optim.SGD(test_model.parameters(), lr=0.1)
    recorder.attach(test_model, optimizer)
    test_model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    recorder.close()
    assert not [u for u in read(tmp_path).updates if "model_layers" in u]
