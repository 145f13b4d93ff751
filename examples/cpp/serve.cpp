// Runs a model that AOTInductor compiled and packaged, without Python: serve MODEL.pt2 TOKENS.pt LOGITS.pt [cuda]
//
// TOKENS.pt and LOGITS.pt are single tensors, as torch::jit::pickle_save and torch.save write them.

#include <liger_ops.h>
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s MODEL.pt2 TOKENS.pt LOGITS.pt [cpu|cuda]\n", argv[0]);
    return 2;
  }
  const c10::Device device(argc > 4 ? argv[4] : "cpu");
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto tokens = torch::jit::pickle_load(bytes).toTensor().to(device);

  c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const auto logits = model.run({tokens}).at(0).cpu();

  const auto pickled = torch::jit::pickle_save(logits);
  std::ofstream(argv[3], std::ios::binary).write(pickled.data(), pickled.size());
  std::printf("%s\n", liger::status().c_str());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
