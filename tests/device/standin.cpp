// A device of torch's that is not the CPU: PrivateUse1, in ordinary memory. See standin.py.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

namespace {

using at::Tensor;
using Index = c10::DeviceIndex;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr Index DEVICES = 2;

// -- memory ------------------------------------------------------------------------------------

thread_local Index current = 0;
std::atomic<int64_t> allocated{0};
std::atomic<pid_t> owner{0};

bool in_bad_fork() { return owner != 0 && owner != getpid(); }

void initialise() {
  TORCH_CHECK(!in_bad_fork(), "Cannot re-initialize standin in forked subprocess. ",
              "To use standin with multiprocessing, you must use the 'spawn' start method");
  owner = getpid();
}

struct Block {
  void* data;
  size_t size;
};

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    initialise();
    auto* block = new Block{size ? c10::alloc_cpu(size) : nullptr, size};
    allocated += static_cast<int64_t>(size);
    return {block->data, block, &release, c10::Device(TYPE, current)};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    allocated -= static_cast<int64_t>(block->size);
    if (block->data) c10::free_cpu(block->data);
    delete block;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
} device_memory;
REGISTER_ALLOCATOR(TYPE, &device_memory);

// Memory of the host that copies to and from a device may be asynchronous with.
struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;

  c10::DataPtr allocate(size_t size) override {
    auto* data = static_cast<char*>(c10::alloc_cpu(size ? size : 1));
    std::lock_guard<std::mutex> guard(mutex);
    blocks[data] = size ? size : 1;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  bool owns(const void* pointer) {
    std::lock_guard<std::mutex> guard(mutex);
    const auto* place = static_cast<const char*>(pointer);
    auto after = blocks.upper_bound(place);
    if (after == blocks.begin()) return false;
    --after;
    return place < after->first + after->second;
  }
  static void release(void* data);
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
} pinned_memory;

void PinnedMemory::release(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_memory.mutex);
    pinned_memory.blocks.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}

c10::Device device_of(std::optional<c10::Device> given) {
  const auto index = given && given->has_index() ? given->index() : current;
  TORCH_CHECK(index < DEVICES, "standin has ", int(DEVICES), " devices, not one of number ", index);
  return {TYPE, index};
}

// -- copies ------------------------------------------------------------------------------------

// Copies to the host that nobody waited for: they arrive when the device is synchronised.
std::mutex arriving;
std::vector<std::pair<Tensor, Tensor>> under_way;

void synchronise() {
  std::vector<std::pair<Tensor, Tensor>> due;
  {
    std::lock_guard<std::mutex> guard(arriving);
    due.swap(under_way);
  }
  at::NoGradGuard no_grad;
  for (auto& [from, to] : due) to.copy_(from);
}

Tensor on_host(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options);
}

std::optional<Tensor> on_host(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional(on_host(*tensor)) : std::nullopt;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::NoGradGuard no_grad;
  auto source = on_host(from), target = on_host(to);
  if (to.is_cpu() && non_blocking) {
    auto copied = source.clone();
    std::lock_guard<std::mutex> guard(arriving);
    under_way.emplace_back(copied, to);
    return to;
  }
  if (to.is_cpu()) synchronise();
  target.copy_(source);
  return to;
}

// -- random numbers ----------------------------------------------------------------------------

// Draws what a generator of the CPU draws from the same seed.
struct Generator final : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();

  explicit Generator(Index index)
      : GeneratorImpl(c10::Device(TYPE, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  c10::GeneratorImpl* inner() const { return host.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override { inner()->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner()->set_offset(offset); }
  uint64_t get_offset() const override { return inner()->get_offset(); }
  uint64_t current_seed() const override { return inner()->current_seed(); }
  uint64_t seed() override { return inner()->seed(); }
  void set_state(const c10::TensorImpl& state) override { inner()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

at::Generator new_generator(Index index) {
  return at::Generator(c10::make_intrusive<Generator>(index < 0 ? current : index));
}

at::Generator& default_generator(Index index) {
  static std::vector<at::Generator> all{new_generator(0), new_generator(1)};
  return all.at(index < 0 ? current : index);
}

// -- operators ---------------------------------------------------------------------------------

void note(const c10::IValue& value, std::vector<Tensor>& tensors) {
  if (value.isTensor() && value.toTensor().defined()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) note(each, tensors);
  }
}

// As CUDA does: numbers and indices may be on the CPU, everything else is on one device.
void check_devices(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> args) {
  const bool indexes = schema.name().find("index") != std::string::npos;
  std::vector<Tensor> tensors;
  for (const auto& arg : args) {
    if (!(indexes && arg.isList())) note(arg, tensors);
  }
  std::optional<c10::Device> first;
  for (const auto& tensor : tensors) {
    if (tensor.is_cpu() && tensor.dim() == 0) continue;
    if (!first) first = tensor.device();
    TORCH_CHECK(*first == tensor.device(), "Expected all tensors to be on the same device, but found ",
                "at least two devices, ", *first, " and ", tensor.device(), "! (when checking ",
                schema.name(), ")");
  }
}

Index index_of(at::ArrayRef<c10::IValue> args) {
  std::vector<Tensor> tensors;
  for (const auto& arg : args) note(arg, tensors);
  for (const auto& tensor : tensors) {
    if (!tensor.is_cpu()) return tensor.device().index();
  }
  return current;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size(), begin = stack->size() - count;
  check_devices(schema, torch::jit::last(*stack, count));
  for (size_t i = 0; i < count; ++i) {
    const auto type = schema.arguments()[i].type();
    if (type->str() != "Generator?" && type->str() != "Generator") continue;
    auto& value = (*stack)[begin + i];
    const auto given = value.isNone() ? default_generator(index_of(torch::jit::last(*stack, count)))
                                      : value.toGenerator();
    TORCH_CHECK(given.device().type() == TYPE, "Expected a 'standin' device type for generator but ",
                "found '", given.device().type(), "'");
    value = given.get<Generator>()->host;
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format",
         [](c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
            std::optional<at::Device> device, std::optional<bool>,
            std::optional<at::MemoryFormat> format) {
           c10::DeviceGuard guard(device_of(device));
           return Tensor(at::detail::empty_generic(
               size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
               c10::dtype_or_default(dtype), format));
         });
  m.impl("empty_strided",
         [](c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
           c10::DeviceGuard guard(device_of(device));
           return Tensor(at::detail::empty_strided_generic(
               size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
               c10::dtype_or_default(dtype)));
         });
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", [](const Tensor& from, const Tensor& to) {
    at::native::resize_(to, from.sizes(), std::nullopt);
    return copy_from(from, to, false);
  });
  m.impl("_local_scalar_dense", [](const Tensor& tensor) {
    synchronise();
    return on_host(tensor).item();
  });
  m.impl("as_strided", [](const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride,
                          std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
  });
  m.impl("resize_", [](const Tensor& tensor, c10::IntArrayRef size,
                       std::optional<at::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(tensor, size, format);
  });
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("set_.source_Storage",
         static_cast<Tensor& (*)(Tensor&, c10::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("unfold", &at::native::unfold);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  // Elsewhere torch puts these together of other operators, which round otherwise than the CPU's.
  // Recurrent ones have no gradient here.
  for (const auto* name : {"lstm.input", "lstm_cell", "gru.input", "gru_cell", "native_layer_norm",
                           "native_group_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                   bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  return at::convolution(on_host(input), on_host(weight), on_host(bias), stride, padding, dilation,
                         transposed, output_padding, groups)
      .to(input.device());
}

// The fallback would lose what this writes to the running statistics.
std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mean, const std::optional<Tensor>& variance, bool training,
    double momentum, double eps) {
  auto [out, save_mean, save_variance] = at::native_batch_norm(
      on_host(input), on_host(weight), on_host(bias), on_host(mean), on_host(variance), training,
      momentum, eps);
  const auto device = input.device();
  return {out.to(device), save_mean.to(device), save_variance.to(device)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("native_batch_norm", &batch_norm);
}

// -- torch's hooks -----------------------------------------------------------------------------

thread_local int64_t streams[DEVICES] = {};
std::atomic<int64_t> last_stream{0};
int event;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  c10::DeviceType type() const override { return TYPE; }
  c10::Device getDevice() const override { return {TYPE, current}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { current = device_of(device).index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  Index deviceCount() const noexcept override { return DEVICES; }

  c10::Stream stream(c10::Device device, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, streams[device_of(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    streams[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return under_way.empty(); }
  void synchronizeStream(const c10::Stream&) const override { synchronise(); }
  void synchronizeDevice(Index) const override { synchronise(); }

  void record(void** to, const c10::Stream&, Index, c10::EventFlag) const override { *to = &event; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return under_way.empty(); }
  void synchronizeEvent(void*) const override { synchronise(); }
  double elapsedTime(void*, void*, Index) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index) const override { return owner == getpid(); }
  Index deviceCount() const override { return DEVICES; }
  Index getCurrentDevice() const override { return current; }
  void setCurrentDevice(Index index) const override { current = index; }
  Index exchangeDevice(Index index) const override { return std::exchange(current, index); }
  Index maybeExchangeDevice(Index index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(Index index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(Index index) const override { return new_generator(index); }
  bool isPinnedPtr(const void* pointer) const override { return pinned_memory.owns(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// -- for Python --------------------------------------------------------------------------------

TORCH_LIBRARY(standin, m) {
  m.def("in_bad_fork", [] { return in_bad_fork(); });
  m.def("initialised", [] { return owner == getpid(); });
  m.def("current_device", [] { return int64_t(current); });
  m.def("set_device", [](int64_t index) { Guard().setDevice({TYPE, Index(index)}); });
  m.def("synchronise", [] { synchronise(); });
  m.def("allocated", [] { return allocated.load(); });
  m.def("seed", [](int64_t index, int64_t seed) {
    default_generator(Index(index)).set_current_seed(seed);
  });
  m.def("rng_state", [](int64_t index) { return default_generator(Index(index)).get_state(); });
  m.def("set_rng_state", [](int64_t index, Tensor state) {
    default_generator(Index(index)).set_state(state);
  });
}

}  // namespace
