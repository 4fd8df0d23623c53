// Runs a compiled graph without holding Python's lock: other threads decode and answer meanwhile.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>
#include <torch/library.h>

struct Graph : torch::CustomClassHolder {
  Graph(const std::string& path, int64_t runners, int64_t device, bool single)
      : loader(path, "model", single, runners, static_cast<c10::DeviceIndex>(device)) {}

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) { return loader.run(inputs); }

  torch::inductor::AOTIModelPackageLoader loader;
};

TORCH_LIBRARY(layertap, library) {
  library.class_<Graph>("Graph").def(torch::init<std::string, int64_t, int64_t, bool>()).def("run", &Graph::run);
}
