from __future__ import annotations

import torch
from torch import nn

from caramba.train.throughput import StepNorms


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedder = nn.Embedding(5, 4)
        self.topology = nn.ModuleDict({"layers": nn.ModuleList([nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 5)])})


def test_norms_are_those_of_the_step_and_leave_it_as_it_is() -> None:
    torch.manual_seed(0)
    model, twin = Blocks().double(), Blocks().double()
    twin.load_state_dict(model.state_dict())
    due, room = [True], [True]
    norms = StepNorms(model.named_parameters(), is_due=lambda: due[0], has_room=lambda size: room[0])
    optimizers = [torch.optim.AdamW(item.parameters(), lr=0.1) for item in (model, twin)]
    norms.attach(optimizers[0])
    for step in range(3):
        due[0], room[0] = step != 1, step != 2
        before = nn.utils.parameters_to_vector(model.parameters()).clone()
        for item, optimizer in zip((model, twin), optimizers, strict=True):
            for index, parameter in enumerate(item.parameters()):
                parameter.grad = torch.full_like(parameter, 0.25 * (index + 1))
            optimizer.step()
        change = nn.utils.parameters_to_vector(model.parameters()) - before
        linear = model.topology["layers"][1]
        expected = torch.cat([p.grad.flatten() for p in linear.parameters()]).norm()
        read = norms.read()
        assert norms.read() == {}, "once"
        if step == 1:
            assert read == {}
            continue
        assert set(read) - {"update_norm"} == {
            "layer_grad_norm/embedder",
            "layer_grad_norm/layers.1",
            "layer_grad_norm/layers.2",
        }
        torch.testing.assert_close(read["layer_grad_norm/layers.1"], float(expected), rtol=1e-14, atol=0)
        assert ("update_norm" in read) == room[0], "no copy where there is no room"
        if room[0]:
            torch.testing.assert_close(read["update_norm"], float(change.detach().norm()), rtol=1e-14, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    norms.detach()
    due[0] = True
    optimizers[0].step()
    assert norms.read() == {}
