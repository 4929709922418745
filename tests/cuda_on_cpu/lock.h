// One thread of the host at a time: the device is one.
#pragma once
#include <mutex>

std::recursive_mutex &cuda_on_cpu_mutex();

struct Lock {
  std::lock_guard<std::recursive_mutex> held{cuda_on_cpu_mutex()};
};
