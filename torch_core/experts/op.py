"""The ops of a layer of experts: its router, and the experts themselves."""

from __future__ import annotations

from torch_core.experts.call import ExpertsCall
from torch_core.experts.routing_call import RouteCall
from torch_core.launch.op import Op, Served, register
from torch_core.launch.serves import ALL, compute_dtype, strides

register(
    Op(
        call=ExpertsCall,
        reference="torch_core.experts.reference.experts:fused_experts",
        cpu="torch_core.experts.cpu:fused_experts",
        plan="torch_core.experts.plan:plan_experts",
        serves=(
            compute_dtype("hidden_states"),
            strides(contiguous=("topk_weights", "topk_ids", "gate_up_bias", "down_bias")),
            Served(
                "layers of experts (fused_experts): every activation of ACTIVATIONS, biases, ids of other devices", ALL
            ),
        ),
    ),
    Op(
        call=RouteCall,
        reference="torch_core.experts.reference.routing:route_experts",
        cpu="torch_core.experts.cpu:route_experts",
        plan="torch_core.experts.kernels.route.plan:plan_route",
        serves=(
            compute_dtype("hidden_states"),
            strides(contiguous=("bias", "correction_bias")),
            Served("routers (route_experts): softmax and sigmoid, groups of experts, a correction bias", ALL),
        ),
    ),
)
