// A CUDA device without a GPU, for builds of PyTorch for CPUs: one stream and no memory. Autograd
// asks for nothing else of a device whose tensors are fake. Loaded before PyTorch, its two functions
// take the place of those of libtorch_cpu.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
constexpr auto kCuda = c10::DeviceType::CUDA;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device) const override { return {kCuda, 0}; }
  c10::Device getDevice() const override { return {kCuda, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kCuda, 0});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
} // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return kCuda; }
} // namespace at::accelerator

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static const Hooks hooks;
  return hooks;
}
} // namespace at::detail
