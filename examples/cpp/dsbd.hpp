// Speculative beam decoding with a bundle of dsbd-export, over the ONNX Runtime C++ API.
//
//     dsbd::Pipeline pipeline("bundle");
//     dsbd::Options options;
//     options.num_beams = 2;
//     const dsbd::Result result = pipeline.generate({1, 2, 3}, options);
//     use(result.sequences.front().token_ids);
//
// What cannot be done is a dsbd::Error. The algorithm alone (dsbd/decode.hpp) needs nothing but
// the standard library and a dsbd::StepModel.
#pragma once

#include "dsbd/decode.hpp"
#include "dsbd/engine.hpp"
#include "dsbd/error.hpp"
#include "dsbd/manifest.hpp"
#include "dsbd/options.hpp"
#include "dsbd/pipeline.hpp"
