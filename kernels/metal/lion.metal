// Lion's update of one tensor, one thread to an element. Every product and sum is rounded by itself.
#include <metal_stdlib>
#pragma METAL fp contract(off)
using namespace metal;

kernel void lion_step(
    device P* parameter [[buffer(0)]],
    device M* momentum [[buffer(1)]],
    device const G* grad [[buffer(2)]],
    constant float& lr [[buffer(3)]],
    constant float& beta1 [[buffer(4)]],
    constant float& rest1 [[buffer(5)]],
    constant float& beta2 [[buffer(6)]],
    constant float& rest2 [[buffer(7)]],
    constant float& decay [[buffer(8)]],
    uint i [[thread_position_in_grid]]) {
    const float weight = float(parameter[i]);
    const float moment = float(momentum[i]);
    const float slope = float(grad[i]);
    const float mixed = moment * beta1 + slope * rest1;
    // The sign of NaN is NaN: a weight whose momentum is lost does not stay a number.
    const float direction = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;
    parameter[i] = P(weight * decay - direction * lr);
    momentum[i] = M(moment * beta2 + slope * rest2);
}
