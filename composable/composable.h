// The public API: fully sharded data parallel training of LibTorch modules.
//
//   #include "composable/composable.h"
//
//   composable::init_process_group();
//   GPT model(config);
//   for (auto& block : *model->blocks) composable::fully_shard(block);
//   composable::fully_shard(model);
//   torch::optim::AdamW optimizer(model->parameters(),
//                                 torch::optim::AdamWOptions(3e-4));
//   for (auto& batch : *loader) {
//     auto loss = model->loss(batch);
//     loss.backward();
//     composable::clip_grad_norm_(model->parameters(), 1.0);
//     optimizer.step();
//     optimizer.zero_grad();
//   }
//   auto weights = composable::full_state_dict(model);
#pragma once

#include "collectives/process_group.h"
#include "composable/boundary.h"
#include "composable/cast_buffers.h"
#include "composable/clip_grad_norm.h"
#include "composable/contract.h"
#include "composable/describe.h"
#include "composable/full_parameters.h"
#include "composable/fully_shard.h"
#include "composable/grad_scaler.h"
#include "composable/gradient_sync_guard.h"
#include "composable/materialize.h"
#include "composable/rebind.h"
#include "composable/state_dict.h"
#include "composable/stats.h"
#include "composable/sync_buffers.h"
#include "composable/tensor_members.h"
#include "state/allow_shard_math.h"
#include "state/mixed_precision_policy.h"
#include "state/offload_policy.h"
