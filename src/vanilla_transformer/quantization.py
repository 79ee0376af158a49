"""int8 on a CPU: matrices of 8-bit whole numbers in the place of 32-bit floats, made when a model is opened.

Each row of a matrix has a scale of its own; what a matrix is multiplied with is rounded to 8 bits at each call, by its
own range ("dynamic" quantisation), so that no text is needed to prepare it. Embeddings, norms, softmax and the
products of attention stay in float32. Source of the scheme: Jacob et al. 2018, sections 2.1 and 2.2.
"""

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel


LARGEST = 127  # of the whole numbers; symmetric, so that zero is zero


class Int8Linear(nn.Module):
    """`nn.Linear` with a matrix of int8.

    Args:
        values (`torch.Tensor` of shape `(out_features, in_features)`, int8): Whole numbers.
        scales (`torch.Tensor` of shape `(out_features,)`, float32): The matrix is `values * scales[:, None]`.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): Stays float32.
    """

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.values, self.scales, self.bias = values, scales, bias
        with warnings.catch_warnings():  # torch announces another library for this, again and again
            warnings.simplefilter("ignore")
            matrix: Any = torch._make_per_channel_quantized_tensor(
                values, scales.double(), torch.zeros(len(scales), dtype=torch.long), 0
            )
            self.packed: Any = torch.ops.quantized.linear_prepack(matrix, bias)

    @classmethod
    def of(cls, linear: nn.Linear) -> "Int8Linear":
        """The nearest one to a plain layer."""
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(dim=1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        values = (weight / scales[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        return cls(values, scales, None if linear.bias is None else linear.bias.detach().float())

    def side_by_side(self, others: "Iterable[Int8Linear]") -> "Int8Linear":
        """One layer that gives the outputs of this one and of others, on the same input, one after the other.

        The search of this package's models asks for it, to have one product in the place of three.
        """
        parts = [self, *others]
        biases = [part.bias for part in parts if part.bias is not None]
        return Int8Linear(
            torch.cat([part.values for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(biases) if biases else None,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape `(..., in_features)` in, `(..., out_features)` out, float32."""
        return torch.ops.quantized.linear_dynamic(x, self.packed, reduce_range=not sums_are_exact())

    def extra_repr(self) -> str:
        """What `print(model)` says of it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@functools.cache
def sums_are_exact() -> bool:
    """Whether this processor adds products of 8 bits up in 32; without, 16 may overflow, and inputs get 7 bits."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(supported and supported())


def to_int8(model: PreTrainedModel) -> PreTrainedModel:
    """Replaces every `nn.Linear` of a model by an `Int8Linear`, in place, for translating on a CPU.

    The output projection gets a matrix of its own; the embeddings that it may share stay as they are. What is left is
    for inference only: it does not train, and is not saved.

    Args:
        model: On a CPU, in float32.

    Returns:
        The model.

    Raises:
        ValueError: The model is elsewhere or in another precision, or torch has no int8 products here.
    """
    kinds = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
    if kinds != {("cpu", torch.float32)}:
        found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        raise ValueError(f"int8 is made of a float32 model on a cpu, got {found}.")
    engines: Sequence[str] = torch.backends.quantized.supported_engines
    if set(engines) <= {"none"}:
        raise ValueError("this build of torch multiplies no int8 matrices; use float32.")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear.of(child))
    model.save_pretrained = refuse_to_save  # type: ignore[method-assign]
    return model.eval()


def refuse_to_save(*args: Any, **kwargs: Any) -> NoReturn:
    """In the place of `save_pretrained`.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "a model in int8 is not saved: open the original with dtype='float32' and save that; int8 is made anew "
        "whenever it is opened."
    )


__all__ = ["Int8Linear", "to_int8"]
