/* Call one entry point of a module under an emulator, with no TVM runtime.
 *
 *     driver MODULE ENTRY ARGUMENTS
 *
 * ARGUMENTS is a file of tensors, read and written in place.  A tensor is 8 int64 (type code, bits,
 * number of axes, 4 extents, bytes), then its bytes.  Every tensor is put one element past a 64-byte
 * boundary: the module must take any element-aligned address.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { CPU = 1, DLTENSOR = 7, MOST_ARGUMENTS = 16, MOST_AXES = 4, HEADER = 4 + MOST_AXES };

typedef struct {
  void* data;
  struct { int32_t type, id; } device;
  int32_t ndim;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct {
  int32_t type_index;
  uint32_t zero;
  union { int64_t number; void* pointer; } value;
} Any;

typedef struct { void* sync; int32_t num_task; } Group;
typedef int (*Task)(int, Group*, void*);
typedef int (*Entry)(void*, const Any*, int32_t, Any*);

/* The one symbol that a module wants of the runtime. */
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  fprintf(stderr, "%s: ", kind);
  for (int32_t i = 0; i < count; ++i) fputs(parts[i], stderr);
  fputc('\n', stderr);
}

static void fail(const char* what, const char* which) {
  fprintf(stderr, "%s: %s\n", what, which);
  exit(1);
}

/* Three tasks one after the other, so that the split of the parallel loop is used. */
static int launch(Task task, void* data, int wanted) {
  Group group = {NULL, wanted > 0 ? wanted : 3};
  for (int i = 0; i < group.num_task; ++i)
    if (task(i, &group, data)) return -1;
  return 0;
}

static void* allocate(int type, int id, uint64_t bytes, int code, int bits) {
  void* found = NULL;
  (void)type, (void)id, (void)code, (void)bits;
  return posix_memalign(&found, 64, bytes ? bytes : 1) ? NULL : found;
}

static int release(int type, int id, void* pointer) {
  (void)type, (void)id;
  free(pointer);
  return 0;
}

static void provide(void* module, const char* name, void* function) {
  void** slot = dlsym(module, name);
  if (slot) *slot = function;
}

static void* load(const char* path) {
  void* module = dlopen(path, RTLD_NOW);
  if (!module) fail("cannot load", dlerror());
  provide(module, "__TVMBackendParallelLaunch", (void*)launch);
  provide(module, "__TVMBackendAllocWorkspace", (void*)allocate);
  provide(module, "__TVMBackendFreeWorkspace", (void*)release);
  return module;
}

static DLTensor read_tensor(FILE* file, const int64_t* header, int64_t* shape) {
  int64_t bytes = header[HEADER - 1], itemsize = header[1] / 8;
  char* memory = allocate(CPU, 0, bytes + itemsize, 0, 0);
  if (!memory || fread(memory + itemsize, 1, bytes, file) != (size_t)bytes) fail("cannot read", "data");
  for (int axis = 0; axis < MOST_AXES; ++axis) shape[axis] = header[3 + axis];
  DLTensor tensor = {.data = memory + itemsize, .device = {CPU, 0}, .ndim = header[2]};
  tensor.dtype.code = header[0];
  tensor.dtype.bits = header[1];
  tensor.dtype.lanes = 1;
  tensor.shape = shape;
  return tensor;
}

int main(int count, char** words) {
  static int64_t headers[MOST_ARGUMENTS][HEADER], shapes[MOST_ARGUMENTS][MOST_AXES];
  static DLTensor tensors[MOST_ARGUMENTS];
  static Any arguments[MOST_ARGUMENTS];
  if (count != 4) fail("usage", "driver MODULE ENTRY ARGUMENTS");

  Entry entry = (Entry)dlsym(load(words[1]), words[2]);
  if (!entry) fail("no entry point", words[2]);
  FILE* file = fopen(words[3], "r+b");
  if (!file) fail("cannot open", words[3]);

  int n = 0;
  for (; n < MOST_ARGUMENTS && fread(headers[n], sizeof headers[n], 1, file) == 1; ++n) {
    tensors[n] = read_tensor(file, headers[n], shapes[n]);
    arguments[n] = (Any){DLTENSOR, 0, {.pointer = &tensors[n]}};
  }
  Any result = {0};
  if (entry(NULL, arguments, n, &result)) fail("the call failed", words[2]);

  rewind(file);
  for (int i = 0; i < n; ++i) {
    fseek(file, sizeof headers[i], SEEK_CUR);
    fwrite(tensors[i].data, 1, headers[i][HEADER - 1], file);
  }
  return fclose(file) ? 1 : 0;
}
