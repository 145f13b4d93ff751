// Loads a scripted model and trains it ten steps, without Python: train MODEL.pt [cuda]

#include <liger_ops.h>
#include <torch/optim/adamw.h>
#include <torch/script.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s MODEL.pt [cpu|cuda]\n", argv[0]);
    return 2;
  }
  const torch::Device device(argc > 2 ? argv[2] : "cpu");
  torch::jit::Module model = torch::jit::load(argv[1], device);
  std::vector<torch::Tensor> parameters;
  for (const auto& parameter : model.parameters()) parameters.push_back(parameter);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2).weight_decay(0));

  torch::manual_seed(0);
  // A random text for the model to memorise. text: (batch, length + 1)
  const auto text = torch::randint(128, {4, 33}, torch::kLong).to(device);
  const auto tokens = text.slice(1, 0, -1).contiguous(), target = text.slice(1, 1).contiguous();
  for (int step = 1; step <= 10; ++step) {
    optimizer.zero_grad();
    const auto loss = model.forward({tokens, target}).toTensor();
    loss.backward();
    optimizer.step();
    std::printf("step %2d  loss %.6f\n", step, loss.item<double>());
  }
  std::printf("%s\n", liger::status().c_str());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
