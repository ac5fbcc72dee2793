// Several GPUs: calls run on their tensors' device whatever device is current, and leave that as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "cases/case.hpp"
#include "runtime/device.hpp"

namespace hopwell::cases {
namespace {

// Small cases of every operator, on every GPU backend that a device has.
std::vector<std::string> failures_on(int device) {
  constexpr std::size_t kCases = 12;
  cuda::use_device(device);
  std::vector<std::string> failures;
  int passed = 0;
  for (const Suite& suite : suites()) {
    for (const std::string& backend : backends(suite.op)) {
      if (!cuda::runs(backend)) continue;
      for (std::size_t i = 0; i < std::min(kCases, suite.cases.size()); ++i) {
        const Report report = run(suite.cases[i], backend, 1);
        if (report.unsupported) continue;
        ++passed;
        for (const std::string& failure : report.failures)
          failures.push_back(suite.op + "/" + suite.cases[i].name + " on " + backend + ", device " +
                             std::to_string(device) + ": " + failure);
      }
    }
  }
  if (passed == 0) failures.push_back("no case ran on device " + std::to_string(device));
  return failures;
}

class Devices : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices().size() < 2) GTEST_SKIP() << "needs two CUDA devices";
  }
  void TearDown() override {
    if (cuda_devices().size() >= 2) cuda::use_device(0);
  }
};

TEST_F(Devices, TheSecondWhileTheFirstIsCurrent) {
  EXPECT_EQ(failures_on(1), std::vector<std::string>{});
  EXPECT_EQ(runtime::current_device(), 0);
}

TEST_F(Devices, TwoFromTwoThreads) {
  std::vector<std::string> of_first, of_second;
  std::thread first([&] { of_first = failures_on(0); }), second([&] { of_second = failures_on(1); });
  first.join();
  second.join();
  EXPECT_EQ(of_first, std::vector<std::string>{});
  EXPECT_EQ(of_second, std::vector<std::string>{});
}

TEST_F(Devices, AStreamOfAnotherIsAnError) {
  const cuda::OwnStream of_first;
  cuda::use_device(1);
  const cuda::OwnStream of_second;
  for (const Suite& suite : suites()) {
    Random random(1);
    Instance instance = suite.cases.front().make(random);
    const std::vector<std::string> backends = hopwell::backends(suite.op);
    const auto on_gpu = std::find_if(backends.begin(), backends.end(), cuda::runs);
    instance.place_for(*on_gpu);
    std::string message;
    try {
      instance.call(on_gpu->c_str(), of_first.get());
    } catch (const Error& error) {
      if (error.status() == HOPWELL_UNSUPPORTED) continue;
      message = error.what();
    }
    EXPECT_EQ(message, suite.op + ": stream must be on cuda:1, the device of the tensors; got a stream of cuda:0");
    EXPECT_NO_THROW(instance.call(on_gpu->c_str(), of_second.get()));
    cuda::synchronize();
  }
}

}  // namespace
}  // namespace hopwell::cases
