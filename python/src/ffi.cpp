// The handlers that XLA calls inside compiled JAX programs: on XLA's buffers where they lie, without Python.
#include <exception>
#include <new>

#include "ffi_call.h"
#include "functions.h"
#include "headway/distributed.h"

namespace headway::python {
namespace {

// ---- What a handler does ----

void forward(const FfiItem& item) {
  const auto& [in, out, options, offset] = item;
  if (offset) {
    distributed::attention_part(*in[Operand::query], *in[Operand::key], *in[Operand::value], *out[Operand::out],
                                *offset, options, {.lse = out[Operand::lse]});
    return;
  }
  attention(*in[Operand::query], *in[Operand::key], *in[Operand::value], *out[Operand::out], options,
            {.lse = out[Operand::lse]});
}

void backward(const FfiItem& item) {
  const auto& [in, out, options, offset] = item;
  const AttentionGradients gradients = {.dq = out[Operand::query],
                                        .dk = out[Operand::key],
                                        .dv = out[Operand::value],
                                        .dbias = out[Operand::bias],
                                        .dsinks = out[Operand::sinks]};
  if (offset) {
    distributed::attention_part_backward(*in[Operand::grad_out], *in[Operand::query], *in[Operand::key],
                                         *in[Operand::value], *in[Operand::out], *in[Operand::lse], gradients, *offset,
                                         options);
    return;
  }
  attention_backward(*in[Operand::grad_out], *in[Operand::query], *in[Operand::key], *in[Operand::value],
                     *in[Operand::out], *in[Operand::lse], gradients, options);
}

void weights(const FfiItem& item) {
  const auto& [in, out, options, offset] = item;
  attention_scores(*in[Operand::query], *in[Operand::key], *out[Operand::weights], Stage::weights, options);
}

// ---- How XLA reaches it ----

xla::Error* error(const xla::CallFrame& frame, xla::Code code, const char* message) {
  xla::ErrorRequest request{sizeof(xla::ErrorRequest), nullptr, message, code};
  return frame.api->create_error(&request);
}

// True if XLA only wanted to know what this handler was written for. It expects its own minor version; that of JAX 0.5
// and 0.6, which ask without their API, is 1.
bool describe(const xla::CallFrame& frame) {
  for (xla::Extension* extension = frame.extensions; extension != nullptr; extension = extension->next) {
    if (extension->kind == xla::metadata_extension) {
      xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(extension)->metadata;
      const int minor = frame.api == nullptr ? 1 : frame.api->version.minor;
      metadata.version = {sizeof(xla::Version), nullptr, xla::api_major, minor};
      metadata.traits = 0;
      return true;
    }
  }
  return false;
}

FfiPlace host_place(const xla::CallFrame&) { return {}; }

using Body = void (*)(const FfiItem&);
using Place = FfiPlace (*)(const xla::CallFrame&);

template <Body body, Place place>
xla::Error* handler(xla::CallFrame* frame) noexcept {
  try {
    if (describe(*frame)) {
      return nullptr;
    }
    const FfiCall call(*frame, place(*frame));
    for (std::int64_t i = 0; i < call.items(); ++i) {
      body(call.item(i));
    }
    return nullptr;
  } catch (const OutOfMemory& caught) {
    return error(*frame, xla::Code::resource_exhausted, caught.what());
  } catch (const Unsupported& caught) {
    return error(*frame, xla::Code::unimplemented, caught.what());
  } catch (const Error& caught) {
    return error(*frame, xla::Code::invalid_argument, caught.what());
  } catch (const std::bad_alloc&) {
    return error(*frame, xla::Code::resource_exhausted, "headway.jax: out of memory");
  } catch (const std::exception& caught) {
    return error(*frame, xla::Code::unknown, caught.what());
  } catch (...) {
    return error(*frame, xla::Code::unknown, "headway.jax: an unknown C++ exception");
  }
}

template <Body body, Place place>
nb::object capsule() {
  return checked(PyCapsule_New(reinterpret_cast<void*>(&handler<body, place>), nullptr, nullptr));
}

template <Place place>
nb::dict handlers() {
  nb::dict result;
  result["headway_attention"] = capsule<forward, place>();
  result["headway_attention_backward"] = capsule<backward, place>();
  result["headway_attention_weights"] = capsule<weights, place>();
  return result;
}

}  // namespace

void add_ffi_handlers(nb::module_& module) {
  nb::dict platforms;  // by XLA's names of them
  platforms["cpu"] = handlers<host_place>();
  platforms["CUDA"] = handlers<cuda_place>();
  module.attr("xla_handlers") = platforms;
}

}  // namespace headway::python
