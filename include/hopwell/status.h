/* The status of a call, the stream that it runs on, and switches. All other headers include this one. */
#ifndef HOPWELL_STATUS_H_
#define HOPWELL_STATUS_H_

#define HOPWELL_API __attribute__((visibility("default")))

typedef enum hopwell_status {
  HOPWELL_OK = 0,
  /** dtype, shape, stride, device, scalar range, or a combination no operator defines */
  HOPWELL_INVALID_ARGUMENT = 1,
  /** legal, but no backend present on this machine runs it; the message lists why */
  HOPWELL_UNSUPPORTED = 2,
  /** the device or its driver reported an error */
  HOPWELL_DEVICE_ERROR = 3,
  HOPWELL_OUT_OF_MEMORY = 4,
  HOPWELL_INTERNAL = 5
} hopwell_status;

/** A flag that is on by default: a field that is not set is on. */
typedef enum hopwell_switch { HOPWELL_DEFAULT_ON = 0, HOPWELL_ON = 1, HOPWELL_OFF = 2 } hopwell_switch;

/** A CUDA stream (cudaStream_t), or null for the default stream; the CPU ignores it. */
typedef void* hopwell_stream;

#endif /* HOPWELL_STATUS_H_ */
