// The compiler's library on a machine without CUDA: a kernel file becomes C++ and, by g++, a shared library, whose
// bytes stand for machine code. driver.cpp loads them.
//
// The text is preprocessed by itself, rewritten, and compiled behind device.h. Rewritten are: `asm` statements, to calls
// of functions named by their text; dynamic shared memory, to a pointer; kernels, to take their parameters by reference
// and be found by name; unroll pragmas, to the compiler's own.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include <semaphore.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

asm(".section .rodata\n"
    ".global emu_device_text\nemu_device_text:\n.incbin \"device.h\"\n.byte 0\n"
    ".global emu_block_text\nemu_block_text:\n.incbin \"block.h\"\n.byte 0\n"
    ".global emu_own_text\nemu_own_text:\n.incbin \"nvrtc.cpp\"\n.byte 0\n"
    ".previous\n");
extern "C" const char emu_device_text[], emu_block_text[], emu_own_text[];

namespace {

const char *const FLAGS =
    "-std=c++17 -O2 -march=native -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -fno-trapping-math "
    "-fno-strict-aliasing -fwrapv -fno-exceptions -fno-rtti -fno-stack-protector -fcf-protection=none "
    "-fno-asynchronous-unwind-tables -mno-red-zone -w";

enum { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, COMPILATION = 6 };

struct Program {
  std::string name, source, log, code;
};

// As many compilers at a time as there are processors.
struct Slots {
  sem_t free;
  Slots() { sem_init(&free, 0, std::max(1u, std::thread::hardware_concurrency())); }
};
Slots slots;

struct Slot {
  Slot() {
    while (sem_wait(&slots.free) != 0) {}
  }
  ~Slot() { sem_post(&slots.free); }
};

// A folder that goes with the value.
struct Folder {
  std::string path;
  Folder() {
    const char *base = getenv("TMPDIR");
    path = std::string(base ? base : "/tmp") + "/emulated-kernel-XXXXXX";
    if (!mkdtemp(path.data())) path.clear();
  }
  ~Folder() {
    if (path.empty()) return;
    for (const char *file : {"block.h", "device.h", "kernel.cpp", "kernel.ii", "rewritten.cpp", "kernel.so", "log"})
      unlink((path + "/" + file).c_str());
    rmdir(path.c_str());
  }
};

std::string read_file(const std::string &path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream out;
  out << in.rdbuf();
  return out.str();
}

void write_file(const std::string &path, const std::string &text) { std::ofstream(path, std::ios::binary) << text; }

bool is_word(char c) { return isalnum((unsigned char)c) || c == '_'; }

size_t skip_space(const std::string &s, size_t i) {
  while (i < s.size() && isspace((unsigned char)s[i])) i++;
  return i;
}

// Behind the string literal at i.
size_t skip_string(const std::string &s, size_t i) {
  char quote = s[i++];
  while (i < s.size() && s[i] != quote) i += s[i] == '\\' ? 2 : 1;
  return i + 1;
}

// Behind the bracket that closes the one at i.
size_t skip_brackets(const std::string &s, size_t i) {
  int depth = 0;
  while (i < s.size()) {
    if (s[i] == '"' || s[i] == '\'') {
      i = skip_string(s, i);
      continue;
    }
    if (strchr("([{", s[i])) depth++;
    if (strchr(")]}", s[i]) && --depth == 0) return i + 1;
    i++;
  }
  return i;
}

// The next place of a whole word from i on.
size_t find_word(const std::string &s, const std::string &word, size_t i) {
  for (; (i = s.find(word, i)) != std::string::npos; i++)
    if ((i == 0 || !is_word(s[i - 1])) && !is_word(s[i + word.size()])) return i;
  return i;
}

// The text of literals at i, concatenated; i goes behind them.
std::string literals(const std::string &s, size_t &i) {
  std::string text;
  for (i = skip_space(s, i); i < s.size() && s[i] == '"'; i = skip_space(s, i)) {
    size_t end = skip_string(s, i);
    text += s.substr(i + 1, end - i - 2) + " ";
    i = end;
  }
  return text;
}

// An instruction's name: what is no letter or digit is one underscore.
std::string mangled(const std::string &text) {
  std::string name = "ptx";
  bool gap = true;
  for (size_t i = 0; i < text.size(); i++) {
    char c = text[i];
    if (c == '\\') {
      i++, gap = true;
    } else if (isalnum((unsigned char)c)) {
      if (gap) name += '_';
      name += c;
      gap = false;
    } else {
      gap = true;
    }
  }
  return name;
}

// `asm [volatile]("text" : "=r"(a) : "r"(b) : "memory")` to `ptx_text(a, b)`.
std::string without_asm(const std::string &s) {
  std::string out;
  size_t done = 0;
  for (size_t at = 0; (at = find_word(s, "asm", at)) != std::string::npos;) {
    size_t i = skip_space(s, at + 3);
    if (s.compare(i, 8, "volatile") == 0) i = skip_space(s, i + 8);
    if (s[i] != '(') {
      at += 3;
      continue;
    }
    size_t end = skip_brackets(s, i);
    std::string name = mangled(literals(s, ++i)), operands;
    for (int section = 0; i < end - 1;) {
      if (s[i] == ':') {
        section++, i++;
      } else if (s[i] == '"') {
        literals(s, i);
        if (s[i] == '(') {
          size_t close = skip_brackets(s, i);
          if (section < 3) operands += (operands.empty() ? "" : ", ") + s.substr(i, close - i);
          i = close;
        }
      } else {
        i++;
      }
    }
    out += s.substr(done, at - done) + name + "(" + operands + ")";
    done = at = end;
  }
  return out + s.substr(done);
}

// A kernel of the text.
struct Found {
  std::string name, threads = "1024";
  std::vector<std::string> types;
};

// One parameter: its type, and the text that takes it by reference.
void parameter(const std::string &text, Found &kernel, std::string &list) {
  size_t end = text.size();
  while (end > 0 && !is_word(text[end - 1])) end--;
  size_t name = end;
  while (name > 0 && is_word(text[name - 1])) name--;
  std::string type = std::regex_replace(text.substr(0, name), std::regex("\\b(const|__grid_constant__)\\b"), "");
  if (text.find('*') != std::string::npos) type = text.substr(0, name);
  bool by_reference = text.find("const") != std::string::npos && text.find('*') == std::string::npos;
  kernel.types.push_back(type);
  list += (list.empty() ? "" : ", ") + text.substr(0, name) + (by_reference ? "&" : "") + text.substr(name, end - name);
}

// Kernels take what they may by reference; `found` gets them.
std::string kernels(const std::string &s, std::vector<Found> &found) {
  std::string out;
  size_t done = 0;
  for (size_t at = 0; (at = find_word(s, "__global__", at)) != std::string::npos;) {
    Found kernel;
    size_t i = at + 10;
    for (;;) {
      i = skip_space(s, i);
      size_t end = i;
      while (end < s.size() && is_word(s[end])) end++;
      std::string word = s.substr(i, end - i);
      i = skip_space(s, end);
      if (word == "__launch_bounds__") {
        size_t close = skip_brackets(s, i);
        kernel.threads = s.substr(i + 1, s.find_first_of(",)", i) - i - 1);
        i = close;
      } else if (word != "void") {
        kernel.name = word;
        break;
      }
    }
    size_t close = skip_brackets(s, i);
    std::string list, text = s.substr(i + 1, close - i - 2);
    int depth = 0;
    size_t start = 0;
    for (size_t k = 0; k <= text.size(); k++) {
      if (k < text.size() && strchr("<([", text[k])) depth++;
      if (k < text.size() && strchr(">)]", text[k])) depth--;
      if (k == text.size() || (text[k] == ',' && depth == 0)) {
        if (k > start) parameter(text.substr(start, k - start), kernel, list);
        start = k + 1;
      }
    }
    out += s.substr(done, at - done) + "void " + kernel.name + "(" + list + ")";
    done = at = close;
    if (s[skip_space(s, close)] == '{') found.push_back(kernel);
  }
  return out + s.substr(done);
}

std::string rewritten(const std::string &preprocessed) {
  std::string s = without_asm(preprocessed);
  s = std::regex_replace(s, std::regex("extern\\s+__shared__\\s+(__align__\\s*\\(\\s*\\d+\\s*\\)\\s+)?([\\w:]+(\\s*\\*)?)\\s*(\\w+)\\s*\\[\\s*\\]"),
                         "$2 *const $4 = ($2 *)emu::block_shared");
  s = std::regex_replace(s, std::regex("#pragma unroll[ \\t]*\\(?(\\d+)\\)?[ \\t]*\\n"), "#pragma GCC unroll $1\n");
  s = std::regex_replace(s, std::regex("#pragma unroll[ \\t]*\\n"), "#pragma GCC unroll 64\n");
  std::vector<Found> found;
  s = kernels(s, found);
  for (const Found &kernel : found) {
    std::string arguments, sizes;
    for (size_t i = 0; i < kernel.types.size(); i++) {
      arguments += (i ? ", *(" : "*(") + kernel.types[i] + " *)args[" + std::to_string(i) + "]";
      sizes += (i ? ", sizeof(" : "sizeof(") + kernel.types[i] + ")";
    }
    s += "\nstatic void emu_call_" + kernel.name + "(void **args) { " + kernel.name + "(" + arguments + "); }\n";
    s += "extern \"C\" {\nextern const EmuKernel emu_kernel_" + kernel.name + " __attribute__((visibility(\"default\")));\n" +
         "const EmuKernel emu_kernel_" + kernel.name + " = {emu_call_" + kernel.name + ", " +
         std::to_string(kernel.types.size()) + ", {" + sizes + "}, " + kernel.threads + "};\n}\n";
  }
  return s;
}

bool run(const std::string &command, const std::string &log) {
  int status = system((command + " >" + log + " 2>&1").c_str());
  return status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Compiles; gives whether it went well.
bool compile(Program &program) {
  Slot slot;
  Folder folder;
  if (folder.path.empty()) {
    program.log = "no folder for temporary files";
    return false;
  }
  const std::string at = folder.path + "/", log = at + "log";
  write_file(at + "kernel.cpp", program.source);
  write_file(at + "device.h", emu_device_text);
  write_file(at + "block.h", emu_block_text);
  if (run("g++ -E -w -std=c++17 -D__CUDACC__ -D__CUDA_ARCH__=900 -D__CUDACC_RTC__ " + at + "kernel.cpp -o " + at + "kernel.ii",
          log)) {
    write_file(at + "rewritten.cpp", rewritten(read_file(at + "kernel.ii")));
    if (run(std::string("g++ ") + FLAGS + " -shared -include " + at + "device.h " + at + "rewritten.cpp -o " + at +
                "kernel.so",
            log)) {
      std::string code = read_file(at + "kernel.so");
      unsigned long long size = code.size();
      program.code = "EMULATED" + std::string((const char *)&size, 8) + code;
    }
  }
  program.log = read_file(log);
  return !program.code.empty();
}

// Of all that decides the code, so that code of another emulator is not taken from a cache.
unsigned version() {
  unsigned hash = 2166136261u;
  for (const char *text : {emu_device_text, emu_block_text, emu_own_text})
    for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 16777619u;
  return 1000 + hash % 1000000000;
}

}  // namespace

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT int nvrtcVersion(int *major, int *minor) {
  *major = 13;
  *minor = (int)version();
  return SUCCESS;
}

EXPORT const char *nvrtcGetErrorString(int code) { return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC"; }

EXPORT int nvrtcCreateProgram(Program **program, const char *source, const char *name, int headers, const char *const *,
                              const char *const *) {
  if (headers != 0) return INVALID_INPUT;
  *program = new Program{name ? name : "kernel", source, "", ""};
  return SUCCESS;
}

EXPORT int nvrtcDestroyProgram(Program **program) {
  delete *program;
  *program = nullptr;
  return SUCCESS;
}

EXPORT int nvrtcCompileProgram(Program *program, int, const char *const *) {
  return compile(*program) ? SUCCESS : COMPILATION;
}

EXPORT int nvrtcGetProgramLogSize(Program *program, size_t *size) {
  *size = program->log.size() + 1;
  return SUCCESS;
}

EXPORT int nvrtcGetProgramLog(Program *program, char *log) {
  memcpy(log, program->log.c_str(), program->log.size() + 1);
  return SUCCESS;
}

EXPORT int nvrtcGetCUBINSize(Program *program, size_t *size) {
  *size = program->code.size();
  return program->code.empty() ? INVALID_PROGRAM : SUCCESS;
}

EXPORT int nvrtcGetCUBIN(Program *program, char *code) {
  memcpy(code, program->code.data(), program->code.size());
  return program->code.empty() ? INVALID_PROGRAM : SUCCESS;
}

EXPORT int nvrtcGetPTXSize(Program *program, size_t *size) { return nvrtcGetCUBINSize(program, size); }

EXPORT int nvrtcGetPTX(Program *program, char *code) { return nvrtcGetCUBIN(program, code); }
}
