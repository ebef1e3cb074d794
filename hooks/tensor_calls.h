// The trigger for calls on sharded parameters that are no operators.
//
// It is registered when the library is loaded; there is nothing to call.
//   shard.set_data(data)          copies this rank's rows of `data`: so
//                                 torch::load of whole values into a sharded
//                                 module shards them, and rows are taken as
//                                 they are; throws for another dtype, device or
//                                 size, so Module::to(dtype) throws
//   member.set_data(data)         throws
//   member.requires_grad_(on)     is done to the shard
//   member.set_grad_dtype(dtype)  is done to the shard, whose next reductions
//                                 leave their gradient in that dtype
//   backward(inputs = {member})   throws
//   member.is_leaf()              false, as for any whole parameter; throws
//                                 where an optimizer asks that is given the
//                                 member
//   torch::save of a shard        throws, unless AllowShardMath is held. What
//                                 is saved there says that it is a shard, and
//                                 can be loaded only under AllowShardMath
// All errors are c10::ValueError and name the parameter and the way out.
//
// How: LibTorch sends these through its VariableHooksInterface, and torch::save
// through the metadata functions of a device type. Both are put before those
// that were there.
#pragma once
