/* Hopwell, the C interface (C99). The argument structs and functions of the operators are in <hopwell/operators.h>, which
 * the build generates from src/ops/<operator>/declaration.py.
 *
 * Tensors are DLPack views, `const DLTensor*`: never owned, never copied; null means absent. An output's DLTensor is
 * const as a description; the memory behind it is written, and no element of it lies where another argument's does.
 * Unless said otherwise the last dimension is contiguous and every other stride is free and 64-bit. Every function
 * checks all of its arguments before it writes anything: on HOPWELL_INVALID_ARGUMENT and HOPWELL_UNSUPPORTED the outputs are
 * untouched. On any other error they may be partly written, and the next call is not affected. Shapes, formulae and
 * corner cases of each operator are documented at its argument struct; `lse` is a natural logarithm, fp32.
 *
 * A CUDA call runs on its tensors' device, whichever is current, and leaves that as it was; its stream must be of that
 * device. A workspace is memory that no argument lies in, and belongs to one call at a time: calls that may overlap, on
 * two streams say, need one each.
 *
 * Every call computes in the default floating-point mode (to nearest, with subnormal numbers) on all of its threads, and
 * the calling thread has its own mode back afterwards.
 *
 * A field that is 0 has its default. If 0 is also a value, the field's comment says how to write it.
 */
#ifndef HOPWELL_HOPWELL_H_
#define HOPWELL_HOPWELL_H_

#include <hopwell/operators.h>
#include <hopwell/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The message of the last call on this thread that did not return HOPWELL_OK; "" if there was none. Valid until the
 * next call. */
HOPWELL_API const char* hopwell_last_error(void);

/** "0.1.0" */
HOPWELL_API const char* hopwell_version(void);

/**
 * How many threads a CPU operator may use, the calling one included: as set, else HOPWELL_NUM_THREADS (0, and an error of every
 * call, if that is no number), else OMP_NUM_THREADS, else as many as there are processors. Results do not depend on it.
 */
HOPWELL_API int hopwell_num_threads(void);
/** For all calls that start from now on; 0: no longer set. An error if negative. */
HOPWELL_API hopwell_status hopwell_set_num_threads(int threads);

#ifdef __cplusplus
}
#endif

#endif /* HOPWELL_HOPWELL_H_ */
