from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class LossHeadParallel(ParallelStyle):
    """A style of `parallelize_module` for :class:`liger_ops.nn.LinearLossHead`: splits the head by class.

    input_layouts: how the hidden states lie, ``Replicate()``, or ``Shard(1)`` for (B, S, H) that are split along the
    sequence. They stay so: the loss gathers them chunk by chunk, and scatters their gradient. The loss, or without a
    target the logits, are complete on every device.
    """

    def __init__(self, *, input_layouts: Placement | None = None, use_local_output: bool = True) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def split(name: str, module: nn.Module, mesh: Any) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

        def prepare(module: nn.Module, args: Any, kwargs: Any) -> Any:
            x, *others = args
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, (self.input_layouts,), run_check=False)
            if kwargs.get("target", others[0] if others else None) is None:
                # Before torch 2.13, a linear layer does not take an input that is split along the sequence.
                x = x.redistribute(device_mesh, [Replicate()])
            return (x, *others), kwargs

        def finish(module: nn.Module, output: Any, mesh: Any) -> Tensor:
            whole = output.redistribute(mesh, [Replicate()])
            if not self.use_local_output:
                return whole
            # FSDP's hooks take no views.
            return whole.to_local() if whole.dim() else whole.to_local().clone()

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return distribute_module(module, device_mesh, split, output_fn=finish)  # type: ignore[arg-type]
