/* What crosses the border between NIXL and a backend plugin, laid out as NIXL 1.3 to 1.5 lay it out (plugin API version 1).
 *
 * NIXL calls virtual functions by their place and reads members by their offset. So the order here is the order there; names of types
 * are NIXL's, for the class's type information. tests/nixl runs with NIXL's own library. */
#ifndef PUSHGATE_NIXL_BORDER_H
#define PUSHGATE_NIXL_BORDER_H

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };
enum nixl_status_t {
    NIXL_IN_PROG = 1,
    NIXL_SUCCESS = 0,
    NIXL_ERR_INVALID_PARAM = -2,
    NIXL_ERR_BACKEND = -3,
    NIXL_ERR_NOT_SUPPORTED = -9,
};
enum class nixl_thread_sync_t { NONE, STRICT, RW };
enum class nixl_cost_t { ANALYTICAL_BACKEND };

using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using nixl_query_resp_t = std::optional<nixl_b_params_t>;
using nixlMemViewH = void *;
using notif_list_t = std::vector<std::pair<std::string, std::string>>;

struct nixlBasicDesc {
    uintptr_t addr;
    size_t len;
    uint64_t devId;
};

struct nixlBlobDesc : nixlBasicDesc {
    std::string metaInfo;
};

/* What a backend keeps of a registration. */
class nixlBackendMD {
  protected:
    bool isPrivateMD;

  public:
    explicit nixlBackendMD(bool is_private) : isPrivateMD(is_private) {}
    virtual ~nixlBackendMD() = default;
};

struct nixlMetaDesc : nixlBasicDesc {
    nixlBackendMD *metadataP;
};

/* NIXL makes the lists, and its virtual functions are not called here. */
template <class T> class nixlDescList {
  protected:
    nixl_mem_t type;
    std::vector<T> descs;

  public:
    virtual ~nixlDescList();
    virtual void resize(const size_t &count);
    virtual void addDesc(const T &desc);
    virtual int getIndex(const nixlBasicDesc &query) const;

    nixl_mem_t getType() const { return type; }
    const std::vector<T> &all() const { return descs; }
};

struct nixlRemoteMetaDesc;
using nixl_meta_dlist_t = nixlDescList<nixlMetaDesc>;
using nixl_remote_meta_dlist_t = nixlDescList<nixlRemoteMetaDesc>;
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;

struct nixlBackendOptionalArgs {
    std::string notifMsg;
    bool hasNotif = false;
    std::string customParam;
};
using nixl_opt_b_args_t = nixlBackendOptionalArgs;
struct nixlAgentOptionalArgs;

class nixlBackendInitParams {
  public:
    std::string localAgent;
    std::string type;
    nixl_b_params_t *customParams;
    bool enableProgTh;
    uint64_t pthrDelay;
    nixl_thread_sync_t syncMode;
    bool enableTelemetry_;
};

/* A transfer as a backend keeps it. */
class nixlBackendReqH {
  public:
    nixlBackendReqH() = default;
    virtual ~nixlBackendReqH() = default;
};

class nixlBackendEngine {
  private:
    std::string backendType;
    nixl_b_params_t customParams;
    /* Events of a type of NIXL's own; we add none. */
    std::vector<uint64_t> telemetryEvents_;
    std::mutex telemetryEventsMutex_;

  protected:
    bool initErr = false;
    const std::string localAgent;
    const bool enableTelemetry_;

  public:
    explicit nixlBackendEngine(const nixlBackendInitParams *init)
        : backendType(init->type), customParams(*init->customParams), localAgent(init->localAgent),
          enableTelemetry_(init->enableTelemetry_) {}
    nixlBackendEngine(const nixlBackendEngine &) = delete;
    void operator=(const nixlBackendEngine &) = delete;
    virtual ~nixlBackendEngine() = default;

    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual nixl_mem_list_t getSupportedMems() const = 0;
    virtual nixl_status_t registerMem(const nixlBlobDesc &mem, const nixl_mem_t &kind, nixlBackendMD *&out) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD *meta) = 0;
    virtual nixl_status_t connect(const std::string &remote_agent) = 0;
    virtual nixl_status_t disconnect(const std::string &remote_agent) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD *input) = 0;
    virtual nixl_status_t prepXfer(const nixl_xfer_op_t &operation, const nixl_meta_dlist_t &local, const nixl_meta_dlist_t &remote,
                                   const std::string &remote_agent, nixlBackendReqH *&handle,
                                   const nixl_opt_b_args_t *opt_args = nullptr) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t &operation, const nixl_meta_dlist_t &local, const nixl_meta_dlist_t &remote,
                                   const std::string &remote_agent, nixlBackendReqH *&handle,
                                   const nixl_opt_b_args_t *opt_args = nullptr) const = 0;
    virtual nixl_status_t checkXfer(nixlBackendReqH *handle) const = 0;
    virtual nixl_status_t releaseReqH(nixlBackendReqH *handle) const = 0;
    virtual nixl_status_t prepMemView(const nixl_remote_meta_dlist_t &, nixlMemViewH &, const nixl_opt_b_args_t * = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t prepMemView(const nixl_meta_dlist_t &, nixlMemViewH &, const nixl_opt_b_args_t * = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual void releaseMemView(nixlMemViewH) const {}
    virtual nixl_status_t getPublicData(const nixlBackendMD *, std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getConnInfo(std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteConnInfo(const std::string &, const std::string &) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &, const std::string &, nixlBackendMD *&) {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getNotifs(notif_list_t &) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t genNotif(const std::string &, const std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t queryMem(const nixl_reg_dlist_t &, std::vector<nixl_query_resp_t> &) const { return NIXL_ERR_NOT_SUPPORTED; }
    virtual nixl_status_t estimateXferCost(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                                           const std::string &, nixlBackendReqH *const &, std::chrono::microseconds &,
                                           std::chrono::microseconds &, nixl_cost_t &, const nixlAgentOptionalArgs * = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
};

class nixlBackendPlugin {
  public:
    int api_version;
    nixlBackendEngine *(*create_engine)(const nixlBackendInitParams *init_params);
    void (*destroy_engine)(nixlBackendEngine *engine);
    const char *(*get_plugin_name)();
    const char *(*get_plugin_version)();
    nixl_b_params_t (*get_backend_options)();
    nixl_mem_list_t (*get_backend_mems)();
};

#endif
