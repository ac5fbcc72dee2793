/* The same as consumer.cpp through the C interface, with kv_stride left at zero, and d_v once: zero means the default. */
#include <hopwell/hopwell.h>
#include <stdio.h>
#include <string.h>

static DLTensor tensor(void* data, uint8_t code, int ndim, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = code;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

int main(void) {
  float q_data[2] = {1, 2}, kv_data[4] = {3, 4, 5, 6}, out_data[2] = {0, 0};
  int32_t index_data[1] = {1};
  int64_t q_shape[3] = {1, 1, 2}, kv_shape[2] = {2, 2}, index_shape[2] = {1, 1};
  DLTensor q = tensor(q_data, kDLFloat, 3, q_shape), kv = tensor(kv_data, kDLFloat, 2, kv_shape);
  DLTensor indices = tensor(index_data, kDLInt, 2, index_shape), out = tensor(out_data, kDLFloat, 3, q_shape);
  hopwell_sparse_mla_forward_args args;
  memset(&args, 0, sizeof args);
  args.q = &q;
  args.kv = &kv;
  args.indices = &indices;
  args.sm_scale = 0.5F;
  args.d_v = 2;
  args.out = &out;
  if (hopwell_sparse_mla_forward(&args, NULL) != HOPWELL_OK) {
    puts(hopwell_last_error());
    return 1;
  }
  if (out_data[0] != 5 || out_data[1] != 6) return 2;

  args.d_v = 0; /* means 512, which is more than these keys have */
  if (hopwell_sparse_mla_forward(&args, NULL) != HOPWELL_INVALID_ARGUMENT) return 3;
  if (strstr(hopwell_last_error(), "sparse_mla_forward: d_v must be") != hopwell_last_error()) return 4;
  return 0;
}
